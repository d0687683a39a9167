"""Which segment a slot size takes from another one: the coldest that nobody holds, and only when it has to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.codes import Gone
from kvstore.index import NOWHERE, Columns
from kvstore.planner.space import TAKE_OVER_EVERY, Space
from kvstore.policy import LeafLRU
from kvstore.slab import Slab

SMALL, LARGE = 4096, 8192
UNIT = 4 * LARGE


class Tier:
    """One arena of `units` segments (8 small or 4 large slots each), with rows put in by hand."""

    def __init__(self, units: int) -> None:
        self.columns = Columns()
        self.size: dict[int, int] = {}
        self.policy = LeafLRU(self.columns, self.size.__getitem__, self.columns.held)
        self.space = Space([Slab(units * UNIT, UNIT)], "dram", self.columns, self.policy, self.evict)
        self.gone: list[tuple[int, Gone]] = []
        self.ticks = 0

    def evict(self, row: int, why: Gone) -> None:
        self.gone.append((row, why))
        self.policy.removed(row)
        location = int(self.columns.dram[row])
        self.columns.dram[row] = NOWHERE
        self.space.free(location)

    def add(self, size: int, parent: int = NOWHERE) -> int:
        location = self.space.allocate(size)
        assert location is not None
        self.ticks += 1
        row = self.columns.add(0, bytes(32), parent, self.ticks)
        self.size[row] = size
        self.columns.dram[row] = location
        self.policy.added([row])
        return row

    def touch(self, row: int) -> None:
        self.ticks += 1
        self.columns.tick[row] = self.ticks


def fill(tier: Tier, segments: int) -> list[list[int]]:
    return [[tier.add(SMALL) for _ in range(8)] for _ in range(segments)]


def test_the_coldest_segment_is_taken() -> None:
    tier = Tier(3)
    first, second, third = fill(tier, 3)
    tier.touch(first[3])
    tier.touch(third[0])
    tier.add(LARGE)
    assert sorted(row for row, _ in tier.gone) == second, "its newest chunk is older than that of the others"
    assert {why for _, why in tier.gone} == {Gone.TAKEOVER}


@pytest.mark.parametrize("hold", ["pins", "busy"])
def test_a_segment_with_one_held_chunk_is_left_alone(hold: str) -> None:
    tier = Tier(2)
    first, second = fill(tier, 2)
    getattr(tier.columns, hold)[first[5]] = 1
    tier.add(LARGE)
    assert sorted(row for row, _ in tier.gone) == second


def test_a_segment_with_a_reserved_slot_is_left_alone() -> None:
    """Its writer may still write: no row names the slot, and that must be enough to see it."""
    tier = Tier(2)
    reserved = tier.space.allocate(SMALL)
    first = [tier.add(SMALL) for _ in range(7)]
    second = [tier.add(SMALL) for _ in range(8)]
    assert reserved == 0
    tier.add(LARGE)
    assert sorted(row for row, _ in tier.gone) == second
    assert not {row for row, _ in tier.gone} & set(first)


def test_nothing_is_evicted_where_nothing_can_be_taken() -> None:
    tier = Tier(1)
    (rows,) = fill(tier, 1)
    tier.columns.pins[rows[0]] = 1
    assert tier.space.allocate(LARGE) is None
    assert not tier.gone


def test_a_chain_in_use_is_as_hot_as_its_tail() -> None:
    """Its first chunks were never touched since, and all of them are older than the loose chunks beside."""
    tier = Tier(3)
    chain = [tier.add(SMALL)]
    for _ in range(7):
        chain.append(tier.add(SMALL, chain[-1]))
    loose = [tier.add(SMALL) for _ in range(8)]
    tail = tier.add(SMALL, chain[-1])
    for _ in range(7):
        tier.add(SMALL)
    tier.touch(tail)
    tier.add(LARGE)
    assert sorted(row for row, _ in tier.gone) == loose


def quiet_and_busy(tier: Tier, newest_of_quiet: Callable[[list[int]], None]) -> None:
    """A large size in use beside a small one that went quiet: the large one turns over its own slots."""
    (quiet,) = fill(tier, 1)
    for _ in range(4):
        tier.add(LARGE)
    newest_of_quiet(quiet)
    for _ in range(2 * TAKE_OVER_EVERY):
        tier.add(LARGE)


def test_a_size_that_went_quiet_gives_its_segment_to_one_in_use() -> None:
    tier = Tier(2)
    quiet_and_busy(tier, lambda rows: None)
    assert sum(why == Gone.TAKEOVER for _, why in tier.gone) == 8
    assert len(tier.space.slabs[0].segments()) == 2
    assert {segment.slot_bytes for segment in tier.space.slabs[0].segments()} == {LARGE}


def test_one_old_chunk_does_not_cost_a_size_its_hot_segment() -> None:
    """Sizes are compared by their oldest chunks; the segment that then went was the coldest, but hot all the same: two
    models in use took whole segments from each other, eight chunks for the sake of one."""
    tier = Tier(2)

    def keep_using(rows: list[int]) -> None:
        for row in rows[1:]:
            tier.columns.tick[row] = 1 << 40

    quiet_and_busy(tier, keep_using)
    assert not [row for row, why in tier.gone if why == Gone.TAKEOVER]
