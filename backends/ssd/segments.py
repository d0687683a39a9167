"""Segment files: `segments/<first unit>.kvs`, one a segment, allocated whole, recycled in place, opened on demand.

A file starts with a 4 KiB header block (formats.SegmentHeader); its slots follow. Which slots are in use is the
planner's knowledge, not this module's. Thread-safe; raises OSError, which the volume maps.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.backends.ssd.files import sync_folder
from kvstore.backends.ssd.formats import SegmentHeader, pack_segment, unpack_segment
from kvstore.backends.ssd.io import write_all
from kvstore.record import HEADER_BYTES
from kvstore.units import PAGE_BYTES, MiB

SEGMENT_HEADER_BYTES = PAGE_BYTES
OPEN_FILES = 256
"""Descriptors kept open: a terabyte has thousands of segments, and the usual soft limit is 1024."""
_ZEROS_BYTES = 4 * MiB


@dataclass(frozen=True, slots=True)
class Segment:
    """`stride_bytes` = record header + slot; 0 where the file is allocated but serves no slot size yet."""

    first_unit: int
    units: int
    stride_bytes: int
    prewritten: bool


@dataclass(slots=True)
class _Handle:
    fd: int
    users: int = 0
    stale: bool = False


class SegmentFiles:
    def __init__(self, folder: Path, volume_id: bytes, unit_bytes: int, size_bytes: int, direct: bool) -> None:
        self.folder = folder
        self.unit_bytes = unit_bytes
        self.units = size_bytes // unit_bytes
        self.notes: list[str] = []
        self.unreadable: set[int] = set()
        """First units of segments whose header the device failed to read: neither served nor overwritten."""
        self._volume_id = volume_id
        self._direct = os.O_DIRECT if direct else 0
        self._shaping = threading.Lock()
        """Held while files are created, cut and allocated: it may block for long. Taken before `_lock`."""
        self._lock = threading.RLock()
        """Guards the table and the descriptors: never held across slow system calls."""
        self._folder_dirty = False
        self._table: dict[int, Segment] = {}
        self._by_unit: dict[int, Segment] = {}
        self._handles: OrderedDict[int, _Handle] = OrderedDict()
        self._zeros: memoryview | None = None

    # -- what is there ---------------------------------------------------------------------------------------------

    def discover(self) -> None:
        """Read every segment's header. A damaged one is left out (its units count as free) and noted."""
        for path in sorted(self.folder.glob("*.kvs")):
            if not path.stem.isdecimal():
                continue
            first = int(path.stem)
            try:
                size = path.stat().st_size
                with path.open("rb", buffering=0) as file:
                    block = file.read(SEGMENT_HEADER_BYTES)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                self.unreadable.add(first)
                self.notes.append(f"segment {path.name} cannot be read: {os.strerror(errno.EIO)}")
                continue
            header = unpack_segment(block)
            if header is None or (header.volume_id, header.first_unit) != (self._volume_id, first):
                self.notes.append(f"segment {path.name} has no valid header: its chunks are lost")
            elif header.unit_bytes != self.unit_bytes or any(first + n in self._by_unit for n in range(header.units)):
                self.notes.append(f"segment {path.name} overlaps another one: its chunks are lost")
            elif first + header.units > self.units:
                path.unlink()
                self.notes.append(f"segment {path.name} lies beyond the volume's size: removed")
            else:
                whole = size >= header.units * self.unit_bytes
                if not whole:
                    self.notes.append(f"segment {path.name} is cut short at {size} bytes")
                self._enter(Segment(first, header.units, header.stride_bytes, header.prewritten and whole))

    def at(self, place: int) -> Segment | None:
        """The segment that holds this byte offset of the volume."""
        return self._by_unit.get(place // self.unit_bytes)

    def starting_at(self, first_unit: int) -> Segment | None:
        return self._table.get(first_unit)

    def all(self) -> list[Segment]:
        with self._lock:
            return sorted(self._table.values(), key=lambda s: s.first_unit)

    def base(self, segment: Segment) -> int:
        """Volume offset of the file's first byte."""
        return segment.first_unit * self.unit_bytes

    def slots(self, segment: Segment) -> int:
        room = segment.units * self.unit_bytes - SEGMENT_HEADER_BYTES
        return room // segment.stride_bytes if segment.stride_bytes else 0

    def holds_slot(self, segment: Segment, place: int, stride_bytes: int) -> bool:
        """Whether `place` is the start of a slot of this size there."""
        number, rest = divmod(place - self.base(segment) - SEGMENT_HEADER_BYTES, stride_bytes)
        return segment.stride_bytes == stride_bytes and not rest and 0 <= number < self.slots(segment)

    def allocated_bytes(self) -> int:
        with self._lock:
            return sum(segment.units for segment in self._table.values()) * self.unit_bytes

    # -- changing it -----------------------------------------------------------------------------------------------

    def format(self, first_unit: int, units: int, stride_bytes: int) -> Segment:
        """Make the segment serve slots of `stride_bytes`; its file is allocated whole. Durable after `sync`."""
        if stride_bytes % PAGE_BYTES or stride_bytes < HEADER_BYTES + PAGE_BYTES:
            raise OSError(errno.EINVAL, f"slot stride {stride_bytes} is not a multiple of 4 KiB above 4 KiB")
        return self._shape(first_unit, units, stride_bytes)

    def prewrite(self, first_unit: int, units: int) -> None:
        """Write every block of the segment's file once; afterwards it serves no slot size until formatted.

        Writes into fresh, "unwritten" extents run at 0.68 of the device's rate, recycled ones at 1.05-1.31 (measured).
        """
        segment = self._shape(first_unit, units, 0)
        zeros = self._zero_block()
        end = units * self.unit_bytes
        with self.use(segment) as fd:
            for offset in range(SEGMENT_HEADER_BYTES, end, _ZEROS_BYTES):
                write_all(fd, [zeros[: min(_ZEROS_BYTES, end - offset)]], offset)
            self._write_header(fd, replace(segment, prewritten=True))
            os.fdatasync(fd)
        self._enter(replace(segment, prewritten=True))

    def _shape(self, first_unit: int, units: int, stride_bytes: int) -> Segment:
        if first_unit < 0 or units < 1 or first_unit + units > self.units:
            raise OSError(errno.EINVAL, f"units {first_unit} to {first_unit + units - 1} lie outside of the volume")
        size = units * self.unit_bytes
        with self._shaping:
            self._make_room(first_unit, units)
            old = self._table.get(first_unit)
            path = self._path(first_unit)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            found = 0
            try:
                found = os.fstat(fd).st_size
                if found > size:
                    os.ftruncate(fd, size)
                os.posix_fallocate(fd, 0, size)
                prewritten = old is not None and old.prewritten and found >= size
                segment = Segment(first_unit, units, stride_bytes, prewritten)
                self._write_header(fd, segment)
            except OSError:
                if old is None and not found:
                    path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
            self._folder_dirty = self._folder_dirty or old is None
            self._enter(segment)
            return segment

    def sync(self, segment: Segment) -> None:
        """fdatasync of the segment's file, and of the folder where files were created since. Raises OSError."""
        with self.use(segment) as fd:
            os.fdatasync(fd)
        if self._folder_dirty:
            self._folder_dirty = False
            sync_folder(self.folder)

    def _make_room(self, first_unit: int, units: int) -> None:
        """Cut or remove files of released segments that reach into these units."""
        for segment in {self._by_unit[u] for u in range(first_unit, first_unit + units) if u in self._by_unit}:
            if segment.first_unit == first_unit:
                continue
            self._leave(segment)
            path = self._path(segment.first_unit)
            if segment.first_unit > first_unit:
                path.unlink()
            else:
                kept = Segment(segment.first_unit, first_unit - segment.first_unit, 0, segment.prewritten)
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    self._write_header(fd, kept)
                    os.ftruncate(fd, kept.units * self.unit_bytes)
                finally:
                    os.close(fd)
                self._enter(kept)

    def _write_header(self, fd: int, segment: Segment) -> None:
        header = SegmentHeader(
            self._volume_id,
            segment.first_unit,
            segment.units,
            self.unit_bytes,
            segment.stride_bytes,
            segment.prewritten,
        )
        block = memoryview(mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        block[:] = pack_segment(header)
        write_all(fd, [block], 0)

    def _enter(self, segment: Segment) -> None:
        with self._lock:
            old = self._table.get(segment.first_unit)
            if old is not None and old.units != segment.units:
                self._leave(old)
            self._table[segment.first_unit] = segment
            for unit in range(segment.first_unit, segment.first_unit + segment.units):
                self._by_unit[unit] = segment

    def _leave(self, segment: Segment) -> None:
        with self._lock:
            del self._table[segment.first_unit]
            for unit in range(segment.first_unit, segment.first_unit + segment.units):
                del self._by_unit[unit]
            handle = self._handles.pop(segment.first_unit, None)
            if handle is not None:
                handle.stale = True
                self._close_idle(handle)

    def _zero_block(self) -> memoryview:
        with self._lock:
            if self._zeros is None:
                self._zeros = memoryview(mmap.mmap(-1, _ZEROS_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            return self._zeros

    # -- descriptors -----------------------------------------------------------------------------------------------

    @contextmanager
    def use(self, segment: Segment) -> Iterator[int]:
        """A descriptor of the segment's file for the time of the block (O_DIRECT where the volume is direct)."""
        with self._lock:
            handle = self._handles.get(segment.first_unit)
            if handle is None:
                handle = _Handle(os.open(self._path(segment.first_unit), os.O_RDWR | os.O_CLOEXEC | self._direct))
                self._handles[segment.first_unit] = handle
                self._shed()
            self._handles.move_to_end(segment.first_unit)
            handle.users += 1
        try:
            yield handle.fd
        finally:
            with self._lock:
                handle.users -= 1
                if handle.stale:
                    self._close_idle(handle)

    def close(self) -> None:
        """Close all descriptors; nothing may be in use any more."""
        with self._lock:
            for handle in self._handles.values():
                os.close(handle.fd)
            self._handles.clear()

    def _shed(self) -> None:
        if len(self._handles) <= OPEN_FILES:
            return
        for unit, handle in self._handles.items():
            if not handle.users:
                os.close(handle.fd)
                del self._handles[unit]
                return

    def _close_idle(self, handle: _Handle) -> None:
        if not handle.users and handle.fd >= 0:
            os.close(handle.fd)
            handle.fd = -1

    def _path(self, first_unit: int) -> Path:
        return self.folder / f"{first_unit:06d}.kvs"
