"""What is there after a restart: from the index, from the headers, and what must not come back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ssd_rig import SMALL, UNIT_BYTES, Rig, file_of, flip, flip_header, flip_payload

from kvstore.backend import Item
from kvstore.backends.ssd.tombstones import Tombstones
from kvstore.keys import NO_PARENT
from kvstore.record import DEAD, HEADER_BYTES, MAGIC
from kvstore.testing.chunks import ROOT, filled, layout_of, make_key, payload_of
from kvstore.units import MiB

OTHER_ROOT = bytes(range(32, 64))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.volume.close()


def reopened(rig: Rig, *, lose_index: bool = False) -> Rig:
    rig.volume.close()
    if lose_index:
        shutil.rmtree(rig.folder / "index")
    return Rig(rig.folder)


@pytest.fixture(params=[False, True], ids=["index", "headers"])
def lose_index(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_columns_hold_everything(rig: Rig, lose_index: bool) -> None:
    items = rig.store(3) + rig.store(2, layout_of(256 * 1024), OTHER_ROOT)
    rig.volume.note_root(ROOT, b'{"model": "m"}')
    again = reopened(rig, lose_index=lose_index)
    try:
        loaded = again.loaded
        assert (len(loaded), loaded.dropped, loaded.rebuilt) == (5, 0, lose_index)
        assert loaded.segments == [(0, HEADER_BYTES + 16 * 1024), (1, HEADER_BYTES + 256 * 1024)]
        rows = {
            (loaded.roots[n], int(pool), key.tobytes(), parent.tobytes(), int(place), int(sequence))
            for n, pool, key, parent, place, sequence in zip(
                loaded.root_number, loaded.pool, loaded.keys, loaded.parents, loaded.place, loaded.sequence, strict=True
            )
        }
        assert rows == {(i.root, i.pool, i.key, NO_PARENT, i.place, i.sequence) for i in items}
        assert loaded.root_number.dtype == np.uint32
        assert loaded.pool.dtype == np.uint16
        assert loaded.keys.shape == loaded.parents.shape == (5, 32)
        assert loaded.descriptions == ({} if lose_index else {ROOT: b'{"model": "m"}'})
        assert again.intact(items)
    finally:
        again.volume.close()


def test_sequences_go_on_above_everything_ever_written(rig: Rig) -> None:
    """A write whose index row was lost must not be newer than what a restarted daemon writes."""
    rig.store(1)
    highest = rig.sequence
    rig.volume.close()
    shutil.rmtree(rig.folder / "index")
    for path in (rig.folder / "segments").iterdir():
        path.unlink()
    again = Rig(rig.folder)
    assert again.loaded.max_sequence >= highest
    again.volume.close()


def test_the_newest_of_two_copies_wins(rig: Rig, lose_index: bool) -> None:
    (old,) = rig.store(1)
    new = rig.again(old)
    assert rig.volume.write([new], filled([new]), True) == [None]
    again = reopened(rig, lose_index=lose_index)
    assert again.loaded.place.tolist() == [new.place]
    assert again.loaded.dropped == 1
    assert again.intact([new])
    again.volume.close()


def test_a_removed_chunk_does_not_come_back_from_an_older_copy(rig: Rig, lose_index: bool) -> None:
    """Evictions leave headers alone: an `rm` that only wiped the current place would bring the older copy back."""
    (old,) = rig.store(1)
    new = rig.again(old)
    rig.volume.write([new], filled([new]), True)
    rig.volume.delete([new])
    again = reopened(rig, lose_index=lose_index)
    assert len(again.loaded) == 0
    assert again.read(old) is None
    newest = again.again(old)
    assert again.volume.write([newest], filled([newest]), True) == [None]
    assert again.read(newest) == payload_of(newest), "storing it again is allowed"
    final = reopened(again, lose_index=lose_index)
    assert final.loaded.place.tolist() == [newest.place]
    final.volume.close()


def test_a_purged_root_is_gone_in_every_way(rig: Rig, lose_index: bool) -> None:
    purged, kept = rig.store(3), rig.store(2, root=OTHER_ROOT)
    rig.volume.tombstone(ROOT, rig.sequence + 1)
    assert [rig.read(item) for item in purged] == [None] * 3
    assert rig.volume.contains(purged + kept) == [False] * 3 + [True] * 2
    later = rig.store(1)
    again = reopened(rig, lose_index=lose_index)
    assert again.loaded_keys() == {item.key for item in kept + later}
    assert again.intact(kept + later)
    final = reopened(again)
    assert final.loaded.dropped == 0, "dead rows leave the index at the first start"
    final.volume.close()


def test_tombstones_survive_a_torn_tail(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store(1)
    rig.volume.tombstone(ROOT, rig.sequence + 1)
    rig.volume.close()
    with (tmp_path / "tombstones").open("ab") as file:
        file.write(b"KVTM torn")
    stones = Tombstones(tmp_path / "tombstones")
    assert (stones.roots, stones.damaged) == ({ROOT: rig.sequence + 1}, 0)
    stones.close()
    again = Rig(tmp_path)
    assert len(again.loaded) == 0
    again.volume.tombstone(OTHER_ROOT, 5)
    again.volume.close()
    stones = Tombstones(tmp_path / "tombstones")
    assert set(stones.roots) == {ROOT, OTHER_ROOT}
    stones.close()


@pytest.mark.parametrize("damage", ["manifest", "current", "tables", "not a folder"])
def test_a_garbage_index_is_rebuilt(tmp_path: Path, damage: str) -> None:
    rig = Rig(tmp_path)
    items = rig.store(20)
    rig.volume.close()
    index = tmp_path / "index"
    if damage == "not a folder":
        shutil.rmtree(index)
        index.write_bytes(b"garbage")
    else:
        pattern = {"manifest": "MANIFEST-*", "current": "CURRENT", "tables": "*"}[damage]
        hit = [path for path in index.glob(pattern) if path.is_file() and path.name != "LOCK"]
        assert hit
        for path in hit:
            path.write_bytes(os.urandom(max(64, path.stat().st_size)))
    again = Rig(tmp_path)
    assert again.loaded.rebuilt
    assert again.loaded_keys() == {item.key for item in items}
    assert again.intact(items)
    again.volume.close()
    assert not (tmp_path / "index.damaged").exists()
    final = Rig(tmp_path)
    assert (final.loaded.rebuilt, len(final.loaded)) == (False, 20)
    final.volume.close()


def test_an_index_whose_filling_was_interrupted_is_rebuilt_again(tmp_path: Path) -> None:
    """Kill during recovery: a half-filled index lacks its mark and must not be believed."""
    rig = Rig(tmp_path)
    items = rig.store(4)
    rig.volume._catalog.remove([item.place for item in items[:2]], durable=True)
    rig.volume._catalog._db.delete(b"m")
    again = reopened(rig)
    assert again.loaded.rebuilt
    assert again.loaded_keys() == {item.key for item in items}
    again.volume.close()


def test_rebuild_leaves_out_damaged_and_moved_headers(rig: Rig) -> None:
    items = rig.store(4)
    flip_header(rig.folder, items[0])
    flip_payload(rig.folder, items[1])
    again = reopened(rig, lose_index=True)
    assert again.loaded_keys() == {item.key for item in items[1:]}, "payloads are verified at read, not at start"
    assert again.loaded.dropped == 1
    again.volume.close()


@pytest.mark.parametrize("size_bytes", [16 * 1024, 512 * 1024])
def test_rebuild_reads_small_and_large_strides(rig: Rig, size_bytes: int) -> None:
    """Small slots are found by reading whole segments, large ones by a read a header: both find all."""
    layout = layout_of(size_bytes)
    items = rig.store(4 * MiB // size_bytes + 5, layout)
    again = reopened(rig, lose_index=True)
    assert again.loaded_keys() == {item.key for item in items}
    again.volume.close()


def test_a_reformatted_segment_forgets_its_records(rig: Rig, lose_index: bool) -> None:
    items = rig.store(3)
    rig.volume.format_segment(0, 1, HEADER_BYTES + 64 * 1024)
    assert [rig.read(item) for item in items] == [None] * 3
    again = reopened(rig, lose_index=lose_index)
    assert len(again.loaded) == 0
    again.volume.close()


def test_a_recycled_place_serves_only_its_last_record(rig: Rig, lose_index: bool) -> None:
    (old,) = rig.store(1)
    new = old.at(old.place, rig.sequence + 1)
    new = type(new)(new.root, 0, make_key(999), SMALL, place=old.place, sequence=new.sequence)
    rig.volume.write([new], filled([new]), True)
    assert rig.read(old) is None
    again = reopened(rig, lose_index=lose_index)
    assert again.loaded_keys() == {new.key}
    again.volume.close()


def test_a_smaller_cap_removes_what_lies_beyond(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    first = rig.store(1, layout_of(512 * 1024))
    beyond = rig.store(1, layout_of(768 * 1024))
    assert beyond[0].place > UNIT_BYTES
    rig.volume.close()
    again = Rig(tmp_path, size_bytes=UNIT_BYTES)
    assert again.loaded_keys() == {first[0].key}
    assert any("beyond the volume's size" in note for note in again.volume.notes)
    assert [path.name for path in (tmp_path / "segments").iterdir()] == ["000000.kvs"]
    again.volume.close()


def test_a_segment_without_a_header_costs_only_itself(rig: Rig) -> None:
    lost, kept = rig.store(2), rig.store(2, layout_of(256 * 1024))
    path, _ = file_of(rig.folder, lost[0])
    flip(path, 20)
    again = reopened(rig)
    assert again.loaded_keys() == {item.key for item in kept}
    assert any("no valid header" in note for note in again.volume.notes)
    assert again.intact(kept)
    again.volume.close()


def test_space_and_prewriting(rig: Rig) -> None:
    volume = rig.volume
    before, free = volume.space()
    assert free > 0
    assert not volume.prewritten(3)
    assert volume.prewrite(3, 1)
    assert volume.prewritten(3)
    assert not volume.prewrite(3, 1)
    assert volume.space()[0] - before >= UNIT_BYTES
    file = rig.folder / "segments" / "000003.kvs"
    assert file.stat().st_blocks * 512 >= UNIT_BYTES
    volume.format_segment(3, 1, HEADER_BYTES + 16 * 1024)
    assert volume.prewritten(3), "recycled files keep their written blocks"
    again = reopened(rig)
    assert again.volume.prewritten(3)
    again.volume.format_segment(2, 2, HEADER_BYTES + 1 * MiB)
    assert not file.exists(), "units go to one segment only"
    assert not again.volume.prewritten(2)
    again.volume.format_segment(3, 1, HEADER_BYTES + 16 * 1024)
    assert (rig.folder / "segments" / "000002.kvs").stat().st_size == UNIT_BYTES
    again.volume.close()


def test_a_start_wipes_the_older_copies_of_removed_chunks(rig: Rig) -> None:
    (old,) = rig.store(1)
    new = rig.again(old)
    rig.volume.write([new], filled([new]), True)
    rig.volume.delete([new])
    path, start = file_of(rig.folder, old)
    assert path.read_bytes()[start : start + 8] == MAGIC
    reopened(rig).volume.close()
    assert path.read_bytes()[start : start + HEADER_BYTES] == DEAD


def test_a_file_made_anew_is_not_written_through_its_old_descriptor(rig: Rig) -> None:
    """A segment swallowed by a larger one loses its file; its units may later get a new file of the same name."""
    stride = HEADER_BYTES + SMALL.slot_bytes
    rig.volume.format_segment(3, 1, stride)
    item = Item(ROOT, 0, make_key(1), SMALL, place=3 * UNIT_BYTES + HEADER_BYTES, sequence=1)
    assert rig.volume.write([item], filled([item])) == [None]
    descriptors = len(os.listdir("/proc/self/fd"))
    rig.volume.format_segment(2, 2, HEADER_BYTES + 1 * MiB)
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    rig.volume.format_segment(3, 1, stride)
    item = item.at(item.place, 2)
    assert rig.volume.write([item], filled([item])) == [None]
    again = reopened(rig)
    assert again.intact([item])
    again.volume.close()
