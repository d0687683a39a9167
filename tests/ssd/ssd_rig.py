"""Volumes for the tests, and probes that look at and damage their files without the backend."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.backend import Item
from kvstore.backends.ssd import Loaded, SSDVolume
from kvstore.errors import KVStoreError
from kvstore.layout import SlotLayout
from kvstore.record import HEADER_BYTES
from kvstore.slab import Slab
from kvstore.testing.chunks import ROOT, aligned, filled, layout_of, make_key, payload_of
from kvstore.units import KiB, MiB

SIZE_BYTES = 64 * MiB
UNIT_BYTES = 4 * MiB
SMALL = layout_of(16 * KiB)


class Rig:
    """A volume with a planner's share of the work: places, sequences, formatted segments."""

    def __init__(self, folder: Path, size_bytes: int = SIZE_BYTES, unit_bytes: int | None = UNIT_BYTES) -> None:
        self.folder = folder
        self.volume = SSDVolume.open(folder, size_bytes, unit_bytes=unit_bytes)
        try:
            self.loaded: Loaded = self.volume.load()
        except KVStoreError:
            self.volume.close()
            raise
        self.slab = Slab(size_bytes, self.volume.unit_bytes, HEADER_BYTES)
        self.sequence = self.loaded.max_sequence
        self._formatted: set[int] = set()
        for first_unit, stride in self.loaded.segments:
            base = first_unit * self.volume.unit_bytes + HEADER_BYTES
            end = base + self.volume.unit_bytes
            used = [(int(p) - base) // stride for p in self.loaded.place if base <= int(p) < end]
            self.slab.adopt(first_unit, stride, used)
            if used:
                self._formatted.add(first_unit)

    def items(self, count: int, layout: SlotLayout = SMALL, root: bytes = ROOT) -> list[Item]:
        """New items in fresh places of formatted segments."""
        stride = HEADER_BYTES + layout.slot_bytes
        out = []
        for _ in range(count):
            place = self.slab.allocate(stride)
            assert place is not None, "the volume of the test is too small"
            segment = self.slab.segment_of(place)
            if segment.first_unit not in self._formatted:
                self.volume.format_segment(segment.first_unit, segment.units, stride)
                self._formatted.add(segment.first_unit)
            self.sequence += 1
            out.append(Item(root, 0, make_key(self.sequence), layout, place=place, sequence=self.sequence))
        return out

    def again(self, item: Item) -> Item:
        """The same identity in another place, as after an eviction and a new store."""
        (other,) = self.items(1, item.layout, item.root)
        return Item(item.root, item.pool, item.key, item.layout, item.parent, other.place, other.sequence)

    def store(self, count: int, layout: SlotLayout = SMALL, root: bytes = ROOT, durable: bool = True) -> list[Item]:
        items = self.items(count, layout, root)
        results = self.volume.write(items, filled(items), durable)
        assert results == [None] * count, results
        return items

    def read(self, item: Item) -> bytes | None:
        buffer = aligned(item.layout.slot_bytes)
        return bytes(buffer) if self.volume.read_into(item, buffer) else None

    def intact(self, items: list[Item]) -> bool:
        return all(self.read(item) == payload_of(item) for item in items)

    def loaded_keys(self) -> set[bytes]:
        return {key.tobytes() for key in self.loaded.keys}


def file_of(folder: Path, item: Item, unit_bytes: int = UNIT_BYTES) -> tuple[Path, int]:
    """(segment file, offset of the record's header), found from the format's description alone."""
    for path in sorted((folder / "segments").glob("*.kvs"), reverse=True):
        base = int(path.stem) * unit_bytes
        if base <= item.place:
            return path, item.place - base
    raise AssertionError(f"no segment file for place {item.place}")


def flip(path: Path, offset: int) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte[0] ^ 0x10]), offset)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def flip_payload(folder: Path, item: Item, offset: int = 100) -> None:
    path, start = file_of(folder, item)
    flip(path, start + HEADER_BYTES + offset)


def flip_header(folder: Path, item: Item, offset: int = 70) -> None:
    path, start = file_of(folder, item)
    flip(path, start + offset)


def swap(folder: Path, one: Item, two: Item) -> None:
    """Exchange two whole records on disk."""
    size = HEADER_BYTES + one.layout.slot_bytes
    (path_one, at_one), (path_two, at_two) = file_of(folder, one), file_of(folder, two)
    with path_one.open("r+b") as file_one, path_two.open("r+b") as file_two:
        file_one.seek(at_one)
        file_two.seek(at_two)
        record_one, record_two = file_one.read(size), file_two.read(size)
        file_one.seek(at_one)
        file_two.seek(at_two)
        file_one.write(record_two)
        file_two.write(record_one)
