"""One SSD volume: a folder with a superblock, a lock, segment files, an index and tombstones (docs/formats.md).

Writes go out as few large vectored direct writes, header beside payload; the header carries checksums seeded by
identity, sequence and place, so that a torn, lost, swapped or flipped record is found at read. Order of a durable
write: data, fdatasync, index with a synced log, then the answer.

Duties of the caller (the planner): places are slots of a formatted segment; no two calls touch one place at a time;
a segment is formatted or prewritten only while none of its slots is in use; sequences rise.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

from kvstore.backend import Item
from kvstore.backends.ssd.columns import Loaded
from kvstore.backends.ssd.files import Gate, replace_file, typed
from kvstore.backends.ssd.formats import KIND_ROOT, Tombstone, pack_superblock
from kvstore.backends.ssd.io import Scratch, plan_runs
from kvstore.backends.ssd.opening import Opened, open_folder
from kvstore.backends.ssd.reader import Outcome, Reader
from kvstore.backends.ssd.recovery import recover
from kvstore.backends.ssd.removal import Remover
from kvstore.backends.ssd.writer import Health, Writer
from kvstore.errors import Corrupt, Invalid, KVStoreError, Unavailable
from kvstore.layout import Group, SlotLayout
from kvstore.record import HEADER_BYTES, Header
from kvstore.slotted import SlottedVolume

SEQUENCE_STEP = 1 << 20
"""The superblock promises a ceiling of sequences in steps of this, so that it is written once a million records."""


class SSDVolume(SlottedVolume):
    """All methods but `load` may be called from any thread, several at once."""

    slotted = True

    def __init__(self, opened: Opened) -> None:
        """Use `open`."""
        self.path = opened.path
        self.volume_id = opened.superblock.volume_id
        self.unit_bytes = opened.superblock.unit_bytes
        self.size_bytes = opened.size_bytes
        self.direct = opened.direct
        self.notes: list[str] = opened.notes
        """One sentence each on what is out of the ordinary, for `status`."""
        self._superblock = opened.superblock
        self._files = opened.files
        self._catalog = opened.catalog
        self._stones = opened.stones
        self._lock_fd = opened.lock_fd
        self._gate = Gate(f"SSD volume {opened.path}")
        self._ceiling_lock = threading.Lock()
        self._described: set[bytes] = set()
        self._scratch = Scratch()
        self._health = Health(abandoned=set(opened.files.unreadable))
        self._reader = Reader(self._files, self._scratch, self.direct)
        self._remover = Remover(self._files, self._reader, self._scratch, self._stones)
        self._writer = Writer(self._files, self._catalog, self._scratch, self._health, self.direct)

    @classmethod
    def open(
        cls,
        path: Path,
        size_bytes: int,
        *,
        unit_bytes: int | None = None,
        direct: Literal["auto", "always", "never"] = "auto",
    ) -> SSDVolume:
        """Open or create a volume of at most `size_bytes` in `path`, which this process then has for itself.

        unit_bytes: for a new volume only (default 64 MiB, more for very large ones); an existing one keeps its own.
        A smaller `size_bytes` than before removes the segments beyond it. Call `load` next.
        Raises Unavailable (in use, naming the process; not writable), Full, Invalid (another format version, sizes),
        Corrupt (damaged superblock: nothing is touched).
        """
        return cls(open_folder(path, size_bytes, unit_bytes, direct))

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def read_only(self) -> bool:
        """The file system turned read-only under us: reads go on, writes are Unavailable."""
        return self._health.read_only

    @property
    def abandoned(self) -> frozenset[int]:
        """First units of segments that are never written again: a sync failed, or the header cannot be read."""
        return frozenset(self._health.abandoned)

    def space(self) -> tuple[int, int]:
        """(bytes allocated by this volume, bytes that the file system still gives to us). Raises Unavailable."""
        with self._gate:
            try:
                self._still_there()
                system = os.statvfs(self.path)
                return self._files.allocated_bytes() + self._catalog.size_bytes(), system.f_bavail * system.f_frsize
            except OSError as error:
                raise typed(error, f"cannot ask for the space of {self.path}") from error

    def _still_there(self) -> None:
        """Raises Unavailable where the folder was deleted or replaced under us: what is written now is lost."""
        try:
            there = os.stat(self.path / "LOCK")
        except FileNotFoundError:
            there = None
        ours = os.fstat(self._lock_fd)
        if there is None or (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            raise Unavailable(f"the SSD folder {self.path} was deleted or replaced while in use")

    def load(self) -> Loaded:
        """What survived: once, after `open`, before anything else. Rebuilds a lost index from the record headers.

        Raises Unavailable where the truth cannot be read now (nothing is deleted then), Full.
        """
        with self._gate:
            try:
                loaded, self._catalog = recover(
                    self._catalog, self._files, self._stones, self.volume_id, self._remover.wipe
                )
            except OSError as error:
                raise typed(error, f"cannot recover the SSD volume {self.path}") from error
            self._writer = Writer(self._files, self._catalog, self._scratch, self._health, self.direct)
            self._health.abandoned |= self._files.unreadable
            self._described = set(loaded.descriptions)
            loaded.max_sequence = max(loaded.max_sequence, self._superblock.sequence_ceiling)
            return loaded

    def note_root(self, digest: bytes, description: bytes) -> None:
        """Keep what a root stands for (JSON), for `ls` after a restart. Idempotent. Raises Full, Unavailable."""
        with self._gate:
            if digest not in self._described:
                self._catalog.put_description(digest, description)
                self._described.add(digest)

    # -- segments --------------------------------------------------------------------------------------------------

    def format_segment(self, first_unit: int, units: int, slot_bytes: int) -> None:
        """Make these units serve slots of `slot_bytes` (record header included), allocated whole; old records go.

        Slots start at `first_unit * unit_bytes + 4096`. Raises Full, Unavailable, Invalid.
        """
        if slot_bytes % 4096 or slot_bytes < 2 * HEADER_BYTES:
            raise Invalid(f"a slot of {slot_bytes} bytes: it must be a multiple of 4 KiB with room for a header")
        self._reshape(first_unit, units, lambda: self._files.format(first_unit, units, slot_bytes))

    def prewrite(self, first_unit: int, units: int) -> bool:
        """Write these free units once, so that later stores run at full speed. False where that was done already.

        Blocks for the time of writing them. They must be formatted before use. Raises as `format_segment`.
        """
        if self.prewritten(first_unit):
            return False
        self._reshape(first_unit, units, lambda: self._files.prewrite(first_unit, units))
        return True

    def prewritten(self, first_unit: int) -> bool:
        segment = self._files.starting_at(first_unit)
        return segment is not None and segment.prewritten

    def _reshape(self, first_unit: int, units: int, change: Callable[[], object]) -> None:
        if first_unit < 0 or units < 1 or (first_unit + units) * self.unit_bytes > self.size_bytes:
            raise Invalid(f"{units} units from {first_unit} on lie outside of the volume")
        with self._gate:
            if any(unit in self._health.abandoned for unit in range(first_unit, first_unit + units)):
                raise Unavailable(f"segment {first_unit} is abandoned after an I/O error")
            if any(self._files.at(u * self.unit_bytes) for u in range(first_unit, first_unit + units)):
                self._catalog.remove_range(first_unit * self.unit_bytes, (first_unit + units) * self.unit_bytes)
            try:
                change()
            except OSError as error:
                raise typed(error, f"cannot allocate segment {first_unit} of {self.path}") from error

    # -- chunks ----------------------------------------------------------------------------------------------------

    def read_into(self, item: Item, buffer: memoryview, on_group: Callable[[int], None] | None = None) -> bool:
        with self._gate:
            if self._stones.kills(item.root, item.pool, item.key, item.sequence):
                return False
            return self._reader.read_into(item, buffer, on_group)

    def read_many(self, items: Sequence[Item], buffers: Sequence[memoryview]) -> list[Outcome]:
        """`read_into` for many small chunks: neighbours come in with one device read of up to 8 MiB.

        One outcome an item, all verified on return. Split a large batch over several threads.
        Raises Invalid (a buffer that does not fit), Closed.
        """
        with self._gate:
            outcomes: list[Outcome] = [False] * len(items)
            unit_of: dict[int, int] = {}
            for number, (item, buffer) in enumerate(zip(items, buffers, strict=True)):
                segment = self._reader.segment_of(item, buffer)
                if segment and not self._stones.kills(item.root, item.pool, item.key, item.sequence):
                    unit_of[number] = segment.first_unit
            for run in plan_runs(items, list(unit_of), unit_of):
                for number, outcome in zip(run, self._reader.read_run(run, items, buffers), strict=True):
                    outcomes[number] = outcome
            return outcomes

    def write(
        self, items: Sequence[Item], buffers: Sequence[memoryview], durable: bool = False
    ) -> list[KVStoreError | None]:
        with self._gate:
            if not items:
                return []
            try:
                self._promise(max(item.sequence for item in items))
            except OSError as error:
                problem = typed(error, f"cannot write the superblock of {self.path}")
                return [problem] * len(items)
            return self._writer.write(items, buffers, durable)

    def contains(self, items: Sequence[Item]) -> list[bool]:
        with self._gate:
            return [self._holds(item) for item in items]

    def delete(self, items: Sequence[Item]) -> None:
        """Durable on return: these identities up to these sequences are gone, older copies in other places too."""
        with self._gate:
            try:
                self._remover.remove(items)
            except OSError as error:
                raise typed(error, f"cannot delete records of {self.path}") from error
            self._catalog.remove([item.place for item in items], durable=True)

    def tombstone(self, root: bytes, sequence: int) -> None:
        """Every record of `root` below `sequence` is dead, durably on return, whatever happens to the index."""
        with self._gate:
            try:
                self._stones.append([Tombstone(KIND_ROOT, root, sequence)])
            except OSError as error:
                raise typed(error, f"cannot write the tombstones of {self.path}") from error

    def scan(self) -> Iterator[Item]:
        """From the index as it is now; layouts are those of the records (one shard, one group)."""
        with self._gate:
            places = [int(place) for rows in self._catalog.rows() for place in rows["place"]]
        for place in places:
            with self._gate:
                header = self._header_for_scan(place)
            if header is not None:
                layout = _layout_of(header)
                yield Item(header.root, header.pool, header.key, layout, header.parent, place, header.sequence)

    def close(self) -> None:
        if self._gate.close():
            with ExitStack() as stack:
                stack.callback(os.close, self._lock_fd)
                stack.callback(self._stones.close)
                stack.callback(self._files.close)
                self._catalog.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _promise(self, sequence: int) -> None:
        """Raise the ceiling on disk before a record above it is written."""
        if sequence < self._superblock.sequence_ceiling:
            return
        with self._ceiling_lock:
            if sequence >= self._superblock.sequence_ceiling:
                block = replace(self._superblock, sequence_ceiling=sequence + SEQUENCE_STEP)
                replace_file(self.path / "VOLUME", pack_superblock(block))
                self._superblock = block

    def _holds(self, item: Item) -> bool:
        try:
            header = self._reader.header_at(item.place, HEADER_BYTES + item.layout.slot_bytes)
        except Corrupt:
            return False
        except OSError as error:
            raise typed(error, f"cannot read a record of {self.path}") from error
        return (
            header is not None
            and (header.root, header.pool, header.key) == (item.root, item.pool, item.key)
            and (header.sequence, header.place) == (item.sequence, item.place)
            and not self._stones.kills(item.root, item.pool, item.key, item.sequence)
        )

    def _header_for_scan(self, place: int) -> Header | None:
        segment = self._files.at(place)
        if segment is None or not segment.stride_bytes:
            return None
        try:
            header = self._reader.header_at(place, segment.stride_bytes)
        except Corrupt:
            return None
        except OSError as error:
            raise typed(error, f"cannot read a record of {self.path}") from error
        if header is None or header.place != place:
            return None
        return None if self._stones.kills(header.root, header.pool, header.key, header.sequence) else header


def _layout_of(header: Header) -> SlotLayout:
    """A layout with the record's extents, enough to read and verify it: one shard, one part, one group."""
    size = header.payload_bytes
    return SlotLayout((0,), (size,), (((0, size),),), (Group(0, 1, header.extents),), 1, size)
