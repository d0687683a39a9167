"""The offline check finds what is wrong, repairs only on request, and deletes only what is proven corrupt."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ssd_rig import Rig, flip_header, flip_payload

from kvstore.backends.ssd.fsck import Report, check
from kvstore.errors import Invalid, Unavailable
from kvstore.layout import one_part_pool, slot_layout
from kvstore.record import HEADER_BYTES
from kvstore.testing.chunks import ROOT


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.volume.close()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "segments").iterdir()}


def test_a_good_volume_is_clean(rig: Rig) -> None:
    rig.store(5)
    rig.volume.close()
    calls: list[tuple[int, int]] = []
    report = check(rig.folder, progress=lambda done, total: calls.append((done, total)))
    assert report == Report(records=5, ok=5)
    assert report.clean
    assert calls[-1][0] == calls[-1][1] > 0


def test_damage_is_found_and_wiped_on_request(rig: Rig) -> None:
    items = rig.store(6)
    rig.volume.delete(items[5:])
    (older,) = rig.store(1)
    newer = rig.again(older)
    rig.volume.write([newer], [memoryview(bytearray(0))])  # refused: nothing changes
    rig.volume.close()
    flip_payload(rig.folder, items[0])
    flip_header(rig.folder, items[1])
    before = snapshot(rig.folder)
    report = check(rig.folder)
    assert (report.records, report.ok, report.corrupt, report.stale_index) == (6, 4, 2, 2)
    assert sorted(report.corrupt_places) == sorted(item.place for item in items[:2])
    assert not report.clean
    assert snapshot(rig.folder) == before, "a check changes nothing"
    assert check(rig.folder, repair=True).repaired
    report = check(rig.folder)
    assert report == Report(records=4, ok=4)
    again = Rig(rig.folder)
    assert again.loaded_keys() == {item.key for item in [*items[2:5], older]}
    assert again.intact([*items[2:5], older])
    again.volume.close()


def test_purged_records_are_counted_apart(rig: Rig) -> None:
    rig.store(3)
    rig.volume.tombstone(ROOT, rig.sequence + 1)
    rig.volume.close()
    report = check(rig.folder)
    assert (report.dropped, report.ok, report.corrupt) == (3, 0, 0)


def test_a_lost_index_is_said_and_rebuilt(rig: Rig) -> None:
    items = rig.store(3)
    rig.volume.close()
    shutil.rmtree(rig.folder / "index")
    assert check(rig.folder).index_lost
    assert not (rig.folder / "index").exists()
    check(rig.folder, repair=True)
    again = Rig(rig.folder)
    assert (again.loaded.rebuilt, again.loaded_keys()) == (False, {item.key for item in items})
    again.volume.close()


def test_only_offline_and_only_volumes(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="in use"):
        check(rig.folder)
    with pytest.raises(Invalid, match="no SSD volume"):
        check(tmp_path / "segments")


def test_leftovers_of_another_slot_size_are_no_damage(rig: Rig) -> None:
    """A segment of small chunks was taken over for larger ones. The slots that no large chunk was written to yet begin
    in the middle of old payloads, and `fsck` called each of them corrupt: 61 on a volume that was never damaged."""
    small = rig.store(8)
    unit = small[0].place // rig.volume.unit_bytes
    larger = slot_layout(one_part_pool(3 * small[0].layout.slot_bytes))
    stride = HEADER_BYTES + larger.slot_bytes
    rig.volume.format_segment(unit, 1, stride)
    place = unit * rig.volume.unit_bytes + HEADER_BYTES + stride  # the second slot: the first stays as it was
    item = replace(small[0], layout=larger, key=bytes([9]) * 32, place=place, sequence=small[-1].sequence + 1)
    buffer = memoryview(mmap.mmap(-1, larger.slot_bytes))
    assert rig.volume.write([item], [buffer]) == [None]
    rig.volume.close()
    report = check(rig.folder)
    assert (report.ok, report.corrupt) == (1, 0)
    assert report.leftovers > 0
    assert report.clean
    flip_header(rig.folder, item)
    assert check(rig.folder).corrupt_places == [place], "what the index names is damage"
