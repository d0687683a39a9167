"""The read path: header and payload in one vectored read; identity, address and checksums before anything counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from kvstore.backend import Item
from kvstore.backends.ssd.files import typed
from kvstore.backends.ssd.io import Scratch, is_aligned, read_all
from kvstore.backends.ssd.lane import READ_BYTES, Lane
from kvstore.backends.ssd.segments import Segment, SegmentFiles
from kvstore.errors import Corrupt, Invalid, KVStoreError
from kvstore.layout import Group
from kvstore.record import HEADER_BYTES, Header, extents_of, seed, unpack
from kvstore.units import PAGE_BYTES, MiB, round_up

PIECE_BYTES = 1 * MiB
"""Of one read request: enough for the device, and small enough to be hashed while it is still in the cache."""
Outcome = bool | KVStoreError
"""Of one read among many: True = verified, False = absent, or the error of this item alone."""


class Reader:
    """Thread-safe, stateless."""

    def __init__(self, files: SegmentFiles, scratch: Scratch, direct: bool) -> None:
        self._files = files
        self._scratch = scratch
        self._direct = direct
        self._lane = Lane(READ_BYTES)

    def read_into(self, item: Item, buffer: memoryview, on_group: Callable[[int], None] | None) -> bool:
        """See `Backend.read_into`."""
        segment = self.segment_of(item, buffer)
        if segment is None:
            return False
        try:
            if on_group is None or len(item.layout.groups) == 1:
                found = self._read_whole(item, buffer, segment)
                if found and on_group is not None:
                    on_group(0)
                return found
            return self._read_groups(item, buffer, segment, on_group)
        except OSError as error:
            raise typed(error, f"cannot read segment {segment.first_unit}") from error

    def read_run(self, run: Sequence[int], items: Sequence[Item], buffers: Sequence[memoryview]) -> list[Outcome]:
        """Neighbouring records in one device read; see `SSDVolume.read_many`. All lie in one segment."""
        segment = self._files.at(items[run[0]].place)
        assert segment is not None
        if len(run) == 1 and buffers[run[0]].nbytes > PIECE_BYTES:
            return [self._outcome(items[run[0]], buffers[run[0]])]
        blocks = self._scratch.pages(len(run))
        views: list[memoryview] = []
        for position, number in enumerate(run):
            views += (blocks[position * HEADER_BYTES : (position + 1) * HEADER_BYTES], buffers[number])
        try:
            with self._lane.enter(sum(view.nbytes for view in views)), self._files.use(segment) as fd:
                have = read_all(fd, views, items[run[0]].place - self._files.base(segment))
        except OSError as error:
            return [typed(error, f"cannot read segment {segment.first_unit}")] * len(run)
        outcomes: list[Outcome] = []
        for position, number in enumerate(run):
            try:
                outcomes.append(_check(items[number], views[2 * position], buffers[number], have))
            except Corrupt as error:
                outcomes.append(error)
            have -= HEADER_BYTES + buffers[number].nbytes
        return outcomes

    def _outcome(self, item: Item, buffer: memoryview) -> Outcome:
        try:
            return self.read_into(item, buffer, None)
        except KVStoreError as error:
            return error

    def segment_of(self, item: Item, buffer: memoryview) -> Segment | None:
        """The segment to read from, None where there is no such slot. Raises Invalid for an unfit buffer."""
        slot_bytes = item.layout.slot_bytes
        if buffer.nbytes != slot_bytes or buffer.readonly:
            raise Invalid(f"a buffer of {buffer.nbytes} bytes (or a read-only one) for a slot of {slot_bytes}")
        if self._direct and not is_aligned(buffer):
            raise Invalid("buffers for direct I/O must start on a 4 KiB boundary")
        segment = self._files.at(item.place)
        if segment is None or not self._files.holds_slot(segment, item.place, HEADER_BYTES + slot_bytes):
            return None
        return segment

    def header_at(self, place: int, stride_bytes: int) -> Header | None:
        """The record header at a slot; None where there is none. Raises Corrupt, OSError."""
        segment = self._files.at(place)
        if segment is None or not self._files.holds_slot(segment, place, stride_bytes):
            return None
        block = self._scratch.pages(1)
        with self._files.use(segment) as fd:
            have = read_all(fd, [block], place - self._files.base(segment))
        return unpack(block) if have == HEADER_BYTES else None

    def _read_whole(self, item: Item, buffer: memoryview, segment: Segment) -> bool:
        """Piece by piece, each hashed while it is in the cache and others of other chunks are on their way."""
        block, size, start = self._scratch.pages(1), buffer.nbytes, item.place - self._files.base(segment)
        done = min(PIECE_BYTES, size)
        with self._lane.enter(done), self._files.use(segment) as fd:
            have = read_all(fd, [block, buffer[:done]], start)
            header = _own_header(item, block, have)
            if header is None:
                return False
            check = _Check(header, buffer)
            while have == HEADER_BYTES + done:
                check.advance(done)
                if done == size:
                    return True
                end = min(done + PIECE_BYTES, size)
                have += read_all(fd, [buffer[done:end]], start + HEADER_BYTES + done)
                done = end
        raise Corrupt(f"the record at place {item.place} is cut short")

    def _read_groups(self, item: Item, buffer: memoryview, segment: Segment, on_group: Callable[[int], None]) -> bool:
        """Header and first group first, then group by group, each reported once it is verified."""
        start = item.place - self._files.base(segment)
        first_extent = 0
        header: Header | None = None
        with self._files.use(segment) as fd:
            for number, group in enumerate(item.layout.groups):
                ranges = _page_ranges(group, buffer.nbytes)
                block = self._scratch.pages(1) if number == 0 else None
                if block is not None:
                    have = self._first_read(fd, start, block, buffer, ranges)
                    header = _own_header(item, block, have)
                    if header is None:
                        return False
                else:
                    have = sum(_read_range(fd, start, buffer, first, end) for first, end in ranges)
                expected = sum(end - first for first, end in ranges) + (HEADER_BYTES if block is not None else 0)
                if have < expected:
                    raise Corrupt(f"the record at place {item.place} is cut short")
                assert header is not None
                end_extent = first_extent + len(group.extents)
                _verify(header, buffer, group.extents, header.sums[first_extent:end_extent])
                first_extent = end_extent
                on_group(number)
        return True

    @staticmethod
    def _first_read(
        fd: int, start: int, block: memoryview, buffer: memoryview, ranges: Sequence[tuple[int, int]]
    ) -> int:
        """Header and first range in one request where they touch."""
        (first, end), rest = ranges[0], ranges[1:]
        if first == 0:
            have = read_all(fd, [block, buffer[:end]], start)
        else:
            have = read_all(fd, [block], start) + _read_range(fd, start, buffer, first, end)
        return have + sum(_read_range(fd, start, buffer, first, end) for first, end in rest)


def _page_ranges(group: Group, slot_bytes: int) -> list[tuple[int, int]]:
    """The group's extents widened to pages: its parts start on pages, and pages are not shared between groups."""
    return [
        (offset // PAGE_BYTES * PAGE_BYTES, min(slot_bytes, round_up(offset + length, PAGE_BYTES)))
        for offset, length in group.extents
    ]


def _read_range(fd: int, start: int, buffer: memoryview, first: int, end: int) -> int:
    return read_all(fd, [buffer[first:end]], start + HEADER_BYTES + first)


def _own_header(item: Item, block: memoryview, have: int) -> Header | None:
    """The header if it is this very record's. Raises Corrupt for a damaged one."""
    if have < HEADER_BYTES:
        return None
    header = unpack(block)
    if header is None or (header.root, header.pool, header.key) != (item.root, item.pool, item.key):
        return None
    if (header.sequence, header.place) != (item.sequence, item.place):
        return None
    if header.extents != extents_of(item.layout) or header.payload_bytes != item.layout.slot_bytes:
        raise Corrupt(f"the record at place {item.place} has another layout than its identity")
    return header


def _check(item: Item, block: memoryview, buffer: memoryview, have: int) -> bool:
    """Header and whole payload were read, `have` bytes of them. Raises Corrupt."""
    header = _own_header(item, block, have)
    if header is None:
        return False
    if have < HEADER_BYTES + buffer.nbytes:
        raise Corrupt(f"the record at place {item.place} is cut short")
    verify(header, buffer)
    return True


class _Check:
    """Verifies a payload that arrives from its start on."""

    def __init__(self, header: Header, payload: memoryview) -> None:
        self._header, self._payload = header, payload
        self._seed = seed(header.root, header.pool, header.key, header.sequence, header.place)
        self._extents = sorted(zip(header.extents, header.sums, strict=True))
        self._hash = xxhash.xxh3_128(seed=self._seed)
        self._done = 0

    def advance(self, end: int) -> None:
        """The bytes before `end` are there. Raises Corrupt."""
        while self._extents:
            (offset, length), expected = self._extents[0]
            first, last = max(offset, self._done), min(offset + length, end)
            if first < last:
                self._hash.update(self._payload[first:last])
            if end < offset + length:
                break
            if self._hash.digest() != expected:
                raise _mismatch(self._header, offset, length)
            self._hash = xxhash.xxh3_128(seed=self._seed)
            del self._extents[0]
        self._done = end


def verify(header: Header, payload: memoryview) -> None:
    """Raises Corrupt where the payload is not what this header was written for."""
    _verify(header, payload, header.extents, header.sums)


def _verify(header: Header, buffer: memoryview, extents: Sequence[tuple[int, int]], sums: Sequence[bytes]) -> None:
    seed_ = seed(header.root, header.pool, header.key, header.sequence, header.place)
    for (offset, length), expected in zip(extents, sums, strict=True):
        if xxhash.xxh3_128_digest(buffer[offset : offset + length], seed_) != expected:
            raise _mismatch(header, offset, length)


def _mismatch(header: Header, offset: int, length: int) -> Corrupt:
    return Corrupt(f"{length} bytes at {offset} of the record at place {header.place} do not match their checksum")
