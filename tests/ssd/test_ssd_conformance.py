"""The SSD volume against the conformance suite of all backends, with direct and with buffered I/O."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ssd_rig import file_of, flip_payload

from kvstore.backend import Backend, Item
from kvstore.backends.ssd import SSDVolume
from kvstore.layout import SlotLayout
from kvstore.record import HEADER_BYTES
from kvstore.slab import Slab
from kvstore.testing.backend_suite import BackendSuite
from kvstore.units import MiB

UNIT_BYTES = 4 * MiB
SIZE_BYTES = 128 * MiB


class TestDirectVolume(BackendSuite):
    direct: Literal["auto", "never"] = "auto"

    def open_backend(self, folder: Path) -> SSDVolume:
        volume = SSDVolume.open(folder / "volume", SIZE_BYTES, unit_bytes=UNIT_BYTES, direct=self.direct)
        volume.load()
        self.slab = Slab(SIZE_BYTES, UNIT_BYTES, HEADER_BYTES)
        return volume

    def place(self, backend: Backend, layout: SlotLayout, count: int) -> list[int]:
        assert isinstance(backend, SSDVolume)
        stride = HEADER_BYTES + layout.slot_bytes
        places = []
        for _ in range(count):
            before = {segment.first_unit for segment in self.slab.segments()}
            place = self.slab.allocate(stride)
            assert place is not None
            segment = self.slab.segment_of(place)
            if segment.first_unit not in before:
                backend.format_segment(segment.first_unit, segment.units, stride)
            places.append(place)
        return places

    def flip_byte(self, folder: Path, item: Item, offset: int) -> None:
        flip_payload(folder / "volume", item, offset)

    def cut(self, folder: Path, item: Item) -> None:
        path, start = file_of(folder / "volume", item)
        with path.open("r+b") as file:
            file.truncate(start + HEADER_BYTES + item.layout.slot_bytes // 2)


class TestBufferedVolume(TestDirectVolume):
    direct = "never"
