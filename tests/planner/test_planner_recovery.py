"""What a start makes of the volumes' columns: links between chunks, wherever they lie, and free places."""

from __future__ import annotations

import pytest
from planner_checks import check
from planner_pictures import Identity, Record, loaded
from planner_world import DISK_UNIT, NAMESPACES, World, chain_key, chain_parent

from kvstore.clock import ManualClock
from kvstore.codes import Load, Tier
from kvstore.index import NOWHERE, ORPHAN
from kvstore.keys import NO_PARENT
from kvstore.namespace import root_digest

STRIDE = 8192
ROOT = root_digest(NAMESPACES[0])


def record(key: bytes, parent: bytes, sequence: int, root: bytes = ROOT) -> Record:
    return Record(Identity(root, 0, key), parent, sequence, [None])


def restore(world: World, volume: int, records: list[Record], unit: int = 0) -> int:
    """Records side by side in the segment that starts at `unit`."""
    base = unit * DISK_UNIT + 4096
    top = max((r.sequence for r in records), default=0)
    columns = loaded([(unit, STRIDE)], {base + n * STRIDE: r for n, r in enumerate(records)}, top)
    return world.planner.recovery.restore(volume, columns)


@pytest.fixture
def world() -> World:
    return World(disk_units=(3, 3))


def rows(world: World) -> dict[bytes, int]:
    return world.state.roots[ROOT].series[0].rows


@pytest.mark.parametrize("parents_first", [True, False])
def test_a_chain_that_lies_on_two_volumes_is_whole_again(world: World, parents_first: bool) -> None:
    chain = [record(chain_key(0, p), chain_parent(0, p), p + 1) for p in range(4)]
    halves = [chain[::2], chain[1::2]]
    for volume, half in enumerate(halves if parents_first else halves[::-1]):
        restore(world, volume, half)
    assert (
        world.columns.flags[rows(world)[chain_key(0, 1)]] & ORPHAN
        or world.columns.flags[rows(world)[chain_key(0, 2)]] & ORPHAN
    ), "before the last volume was read the chain has gaps"
    world.planner.recovery.relink()
    world.open(b"one")
    keys = b"".join(chain_key(0, p) for p in range(4))
    assert world.planner.loads.lookup(world.series(b"one", 0), keys) == bytes([Tier.SSD] * 4)
    for p in range(1, 4):
        assert world.columns.parent[rows(world)[chain_key(0, p)]] == rows(world)[chain_key(0, p - 1)]


def test_what_hangs_on_a_lost_chunk_is_hidden_until_it_is_stored_again(world: World) -> None:
    restore(world, 0, [record(chain_key(0, p), chain_parent(0, p), p + 1) for p in (0, 2)])
    world.planner.recovery.relink()
    engine = world.open(b"one")
    series = world.series(b"one", 0)
    keys = [chain_key(0, p) for p in range(3)]
    assert world.planner.loads.lookup(series, b"".join(keys)) == bytes([Tier.SSD])
    number = world.reserve(b"one", engine.owners[0], 0, 0, keys[1:2])
    assert number is not None
    world.commit(b"one", number, 0, 1, hold=False)
    assert world.planner.loads.lookup(series, b"".join(keys)) == bytes([Tier.SSD, Tier.DRAM, Tier.SSD])


def test_keys_alike_in_eight_bytes_are_not_taken_for_one_another(world: World) -> None:
    """Parents are joined by eight key bytes, which two keys may share; then all 32 must agree."""
    twins = [bytes(8) + bytes([n]) * 24 for n in (1, 2)]
    children = [bytes([9, n]) + bytes(30) for n in (1, 2)]
    restore(
        world,
        0,
        [record(twin, NO_PARENT, n) for n, twin in enumerate(twins)]
        + [record(child, twin, 7 + n) for n, (child, twin) in enumerate(zip(children, twins, strict=True))],
    )
    for child, twin in zip(children, twins, strict=True):
        assert world.columns.parent[rows(world)[child]] in (rows(world)[twin], NOWHERE)
    world.planner.recovery.relink()
    for child, twin in zip(children, twins, strict=True):
        assert world.columns.parent[rows(world)[child]] == rows(world)[twin]


def test_equal_keys_of_two_roots_stay_apart(world: World) -> None:
    other = root_digest(NAMESPACES[1])
    restore(world, 0, [record(chain_key(0, 0), NO_PARENT, 1, other), record(chain_key(0, 1), chain_key(0, 0), 2)])
    world.planner.recovery.relink()
    assert rows(world) == {chain_key(0, 1): 1}
    assert world.columns.flags[1] & ORPHAN, "its parent is another root's chunk of the same key"


def test_a_segment_without_living_records_is_free_space_and_sequences_go_on(world: World) -> None:
    assert restore(world, 0, [record(chain_key(0, 0), NO_PARENT, 41)]) == 1
    assert restore(world, 1, [], unit=2) == 0
    assert world.state.ssd.slabs[0].free_units() == [1, 2]
    assert world.state.ssd.slabs[1].free_units() == [0, 1, 2]
    assert world.state.ssd.slabs[1].free_units(may_grow=False) == [2], "the disk gave that one already"
    assert world.state.next_sequence == 42


def test_of_one_session_and_of_all_only_so_much_is_pinned(world: World) -> None:
    """Half of the arena for one session, 80 % for all: what is more is a miss, with the reason, and at once."""
    world = World(arena_units=4, disk_units=())
    for name in (b"one", b"two"):
        world.open(name)
        for number in range(3):
            reservation = world.reserve(
                name, world.engines[name].owners[0], 0, 0, [chain_key(number, p) for p in range(12)]
            )
            if reservation is not None:
                world.commit(name, reservation, 0, 12, hold=False)
    assert len(rows(world)) == 28
    session, series = world.engines[b"one"].session, world.series(b"one", 0)
    wanted = [chain_key(number, p) for number in range(3) for p in range(12) if not (number and p < 4)]
    lease, codes, *_ = world.planner.loads.lease(session, series, b"".join(wanted), False, 30.0)
    assert lease is not None
    assert list(codes) == [Load.DRAM] * 16 + [Load.MISS_QUOTA] * 12
    other, codes, *_ = world.planner.loads.lease(
        world.engines[b"two"].session, world.series(b"two", 0), b"".join(wanted[:4] + wanted[16:]), False, 30.0
    )
    assert other is not None
    assert list(codes) == [Load.DRAM] * 9 + [Load.MISS_QUOTA] * 7
    assert isinstance(world.clock, ManualClock)
    world.expire(31.0)
    assert world.state.pinned_bytes == 0
    check(world)
