"""The write path: checksum, header beside payload, few large vectored writes, then the index."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.backend import Item
from kvstore.backends.ssd.catalog import Catalog, Row
from kvstore.backends.ssd.files import typed
from kvstore.backends.ssd.io import Scratch, is_aligned, plan_runs, write_all
from kvstore.backends.ssd.lane import WRITE_BYTES, Lane
from kvstore.backends.ssd.segments import Segment, SegmentFiles
from kvstore.errors import Corrupt, Full, Invalid, KVStoreError, Unavailable
from kvstore.record import HEADER_BYTES, Header, extents_of, pack, seed, sum_extents


@dataclass(slots=True)
class Health:
    """What the device has taught us; read by the volume's owner."""

    read_only: bool = False
    abandoned: set[int] = field(default_factory=set)
    """First units of segments whose fdatasync failed or whose header is unreadable: nothing is written there again."""


class Writer:
    """Thread-safe: state is only the shared health. Call as often at once as the device wants requests in flight."""

    def __init__(self, files: SegmentFiles, catalog: Catalog, scratch: Scratch, health: Health, direct: bool) -> None:
        self._files = files
        self._catalog = catalog
        self._scratch = scratch
        self._health = health
        self._direct = direct
        self._lane = Lane(WRITE_BYTES)

    def write(self, items: Sequence[Item], buffers: Sequence[memoryview], durable: bool) -> list[KVStoreError | None]:
        results: list[KVStoreError | None] = [None] * len(items)
        segments: dict[int, Segment] = {}
        for number, (item, buffer) in enumerate(zip(items, buffers, strict=True)):
            segment = self._files.at(item.place)
            error = self._refusal(item, buffer, segment)
            if error is None and segment is not None:
                segments[number] = segment
            else:
                results[number] = error
        unit_of = {number: segment.first_unit for number, segment in segments.items()}
        for run in plan_runs(items, list(segments), unit_of):
            self._write_run(run, segments[run[0]], items, buffers, results)
        if durable:
            self._sync(segments, results)
        stored = [n for n in segments if results[n] is None]
        try:
            self._catalog.put([_row(items[n]) for n in stored], durable)
        except (Full, Unavailable, Corrupt) as error:
            for number in stored:
                results[number] = error if isinstance(error, Full) else Unavailable(str(error))
        return results

    def _refusal(self, item: Item, buffer: memoryview, segment: Segment | None) -> KVStoreError | None:
        stride = HEADER_BYTES + item.layout.slot_bytes
        if segment is None or not self._files.holds_slot(segment, item.place, stride):
            return Invalid(f"place {item.place} is no slot of {item.layout.slot_bytes} bytes in a formatted segment")
        if buffer.nbytes != item.layout.slot_bytes:
            return Invalid(f"a buffer of {buffer.nbytes} bytes for a slot of {item.layout.slot_bytes}")
        if self._direct and not is_aligned(buffer):
            return Invalid("buffers for direct I/O must start on a 4 KiB boundary")
        if segment.first_unit in self._health.abandoned:
            return Unavailable(f"segment {segment.first_unit} was abandoned after a failed sync")
        return None

    def _write_run(
        self,
        run: Sequence[int],
        segment: Segment,
        items: Sequence[Item],
        buffers: Sequence[memoryview],
        results: list[KVStoreError | None],
    ) -> None:
        """One device write for neighbouring slots: [header, payload, header, payload, ...]."""
        blocks = self._scratch.pages(len(run))
        views: list[memoryview] = []
        for position, number in enumerate(run):
            block = blocks[position * HEADER_BYTES : (position + 1) * HEADER_BYTES]
            block[:] = _header(items[number], buffers[number])
            views += (block, buffers[number])
        try:
            with self._lane.enter(sum(view.nbytes for view in views)), self._files.use(segment) as fd:
                write_all(fd, views, items[run[0]].place - self._files.base(segment))
        except OSError as error:
            if error.errno == errno.EROFS:
                self._health.read_only = True
            problem = typed(error, f"cannot write to segment {segment.first_unit}")
            for number in run:
                results[number] = problem

    def _sync(self, segments: dict[int, Segment], results: list[KVStoreError | None]) -> None:
        """A failed fdatasync is never tried again: the kernel may have dropped the pages and report success next time.

        Source: Rebello et al., "Can Applications Recover from fsync Failures?" (USENIX ATC 2020).
        """
        for segment in {segments[n] for n in segments if results[n] is None}:
            try:
                self._files.sync(segment)
            except OSError as error:
                self._health.abandoned.add(segment.first_unit)
                for number, other in segments.items():
                    if other.first_unit == segment.first_unit and results[number] is None:
                        results[number] = typed(error, f"cannot sync segment {segment.first_unit}")


def _header(item: Item, buffer: memoryview) -> bytes:
    extents = extents_of(item.layout)
    seed_ = seed(item.root, item.pool, item.key, item.sequence, item.place)
    sums = sum_extents(buffer, extents, seed_)
    size = item.layout.slot_bytes
    return pack(Header(item.root, item.pool, item.key, item.parent, item.sequence, item.place, size, extents, sums))


def _row(item: Item) -> Row:
    return Row(item.place, item.sequence, item.root, item.pool, item.key, item.parent)
