"""The slot allocator against an oracle that knows nothing but intervals; and regressions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.errors import Invalid
from kvstore.slab import SLOTS_PER_SEGMENT, Slab
from kvstore.units import KiB, MiB

PAGE = 4096
UNIT = 16 * PAGE
SIZES = [PAGE, 3 * PAGE, 4 * PAGE, 5 * PAGE, 16 * PAGE, 40 * PAGE]
"""From 16 slots a unit to segments of 4 and of 10 units."""


class SlabModel(RuleBasedStateMachine):
    """`used`: offset -> size of every slot handed out. What a segment is, the oracle derives from the rules alone."""

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[int, int] = {}
        self.segments: dict[int, tuple[int, int]] = {}
        """first unit -> (units, slot size)."""
        self.hidden: set[int] = set()
        self.once_used: set[int] = set()

    @initialize(
        units=st.integers(0, 24), header=st.sampled_from([0, PAGE]), spare=st.integers(0, UNIT - 1), data=st.data()
    )
    def start(self, units: int, header: int, spare: int, data: Any) -> None:
        """A space of some units; perhaps segments found on disk, in any order."""
        self.header, self.units = header, units
        self.slab = Slab(units * UNIT + spare, UNIT, header)
        for _ in range(data.draw(st.integers(0, 3))):
            first, size = data.draw(st.integers(-1, units)), data.draw(st.sampled_from(SIZES))
            slots = self.slots_of(size)
            used = data.draw(st.sets(st.integers(0, slots - 1), max_size=6))
            run = range(first, first + self.units_of(size))
            if first < 0 or run.stop > units or any(unit in self.taken_units() for unit in run):
                with pytest.raises(Invalid):
                    self.slab.adopt(first, size, used)
                continue
            with pytest.raises(Invalid):
                self.slab.adopt(first, size, {slots, *used})
            with pytest.raises(Invalid):
                self.slab.adopt(first, size, {-1, *used})
            self.slab.adopt(first, size, used)
            self.once_used |= set(run)
            self.used |= {self.base(first) + number * size: size for number in used}
            if used:
                self.segments[first] = (len(run), size)

    def units_of(self, size: int) -> int:
        units = 1
        while units * UNIT < size * SLOTS_PER_SEGMENT + self.header:
            units += 1
        return units

    def slots_of(self, size: int) -> int:
        return (self.units_of(size) * UNIT - self.header) // size

    def base(self, first: int) -> int:
        return first * UNIT + self.header

    def taken_units(self) -> set[int]:
        return {unit for first, (units, _) in self.segments.items() for unit in range(first, first + units)}

    def free_offsets(self, size: int) -> list[int]:
        """Free slots in the segments of that size, lowest first."""
        slots = range(self.slots_of(size))
        bases = [self.base(first) for first, (_, served) in sorted(self.segments.items()) if served == size]
        return [base + n * size for base in bases for n in slots if base + n * size not in self.used]

    def free_run(self, size: int, may_grow: bool = True) -> int | None:
        """Lowest run of free units that a new segment could take; if it may not grow, of those used once before."""
        need, taken = self.units_of(size), self.taken_units() | self.hidden
        taken |= set() if may_grow else set(range(self.units)) - self.once_used
        runs = (f for f in range(self.units - need + 1) if not taken & set(range(f, f + need)))
        return next(runs, None)

    @rule(size=st.sampled_from(SIZES), may_grow=st.booleans())
    def allocate(self, size: int, may_grow: bool) -> None:
        open_slots, run = self.free_offsets(size), self.free_run(size, may_grow)
        self.slab.may_take = None if may_grow else 0
        offset = self.slab.allocate(size)
        if open_slots:
            assert offset == open_slots[0], "the lowest free slot of the lowest open segment"
        elif run is None:
            assert offset is None
        else:
            assert offset == self.base(run)
            self.segments[run] = (self.units_of(size), size)
            self.once_used |= set(range(run, run + self.units_of(size)))
        if offset is not None:
            self.used[offset] = size

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        self.give_back(data.draw(st.sampled_from(sorted(self.used))))

    @precondition(lambda self: self.units)
    @rule(data=st.data())
    def hide_a_unit(self, data: Any) -> None:
        unit = data.draw(st.integers(0, self.units - 1))
        free = unit not in self.hidden | self.taken_units()
        assert self.slab.hide_unit(unit) == free
        if free:
            self.hidden.add(unit)

    @precondition(lambda self: self.hidden)
    @rule(data=st.data())
    def show_a_unit(self, data: Any) -> None:
        unit = data.draw(st.sampled_from(sorted(self.hidden)))
        self.hidden.remove(unit)
        self.slab.show_unit(unit)
        self.once_used.add(unit)

    @precondition(lambda self: self.segments)
    @rule(data=st.data(), size=st.sampled_from(SIZES))
    def take_over(self, data: Any, size: int) -> None:
        """A whole segment is evicted, so a slot size that fits into its place is served by it or by what is free."""
        first = data.draw(st.sampled_from(sorted(self.segments)))
        units, _ = self.segments[first]
        for offset in [o for o in self.used if self.base(first) <= o < (first + units) * UNIT]:
            self.give_back(offset)
        assert first not in self.segments
        if self.units_of(size) <= units:  # hidden units were free before, so none lies in here
            assert self.free_run(size) is not None
            self.allocate(size, True)

    def give_back(self, offset: int) -> None:
        size = self.used.pop(offset)
        first = next(f for f, (units, _) in self.segments.items() if f * UNIT <= offset < (f + units) * UNIT)
        units, served = self.segments[first]
        assert served == size
        emptied = self.slab.free(offset)
        if any(self.base(first) <= other < (first + units) * UNIT for other in self.used):
            assert emptied is None
        else:
            assert emptied is not None
            assert (emptied.first_unit, emptied.units, emptied.slot_bytes) == (first, units, size)
            del self.segments[first]

    @invariant()
    def no_overlap_and_inside(self) -> None:
        end = 0
        for offset, size in sorted(self.used.items()):
            assert offset >= end
            assert offset % PAGE == 0
            end = offset + size
        assert end <= self.units * UNIT

    @invariant()
    def books_agree(self) -> None:
        slab = self.slab
        assert slab.used_bytes == sum(self.used.values())
        assert slab.free_units() == sorted(set(range(self.units)) - self.taken_units() - self.hidden)
        found = {segment.first_unit: segment for segment in slab.segments()}
        assert {first: (segment.units, segment.slot_bytes) for first, segment in found.items()} == self.segments
        for first, segment in found.items():
            mine = sum(first * UNIT <= offset < (first + segment.units) * UNIT for offset in self.used)
            assert (segment.used, segment.free) == (mine, segment.slots - mine)
            assert segment.slots == self.slots_of(segment.slot_bytes)
        for size in SIZES:
            free_units = len(slab.free_units()) // self.units_of(size) * self.slots_of(size)
            assert slab.free_slots(size) == len(self.free_offsets(size)) + free_units
            assert slab.fits(size) == (self.units_of(size) <= self.units)
        assert set(slab.slot_sizes()) == {size for _, size in self.segments.values()}
        for offset in self.used:
            segment = slab.segment_of(offset)
            assert segment.first_unit * UNIT <= offset < (segment.first_unit + segment.units) * UNIT


SlabModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSlab = SlabModel.TestCase


@pytest.mark.parametrize("size", [0, -PAGE, 100, PAGE + 1])
def test_slot_sizes_are_multiples_of_a_page(size: int) -> None:
    with pytest.raises(Invalid):
        Slab(UNIT).allocate(size)
    with pytest.raises(Invalid):
        Slab(UNIT).fits(size)


def test_units_and_headers_are_multiples_of_a_page() -> None:
    for unit, header in ((1000, 0), (UNIT, 100)):
        with pytest.raises(Invalid):
            Slab(1 << 20, unit, header)


def test_a_slot_that_the_space_can_never_hold() -> None:
    slab = Slab(8 * UNIT, UNIT)
    assert not slab.fits(40 * PAGE)
    assert slab.allocate(40 * PAGE) is None
    assert slab.fits(16 * PAGE)


def test_evicting_at_the_brim_does_not_grow_the_books() -> None:
    """A full arena frees one slot and takes one, for ever: each round left one more entry in the heap."""
    slab = Slab(4 * UNIT, UNIT)
    offsets = []
    while (offset := slab.allocate(PAGE)) is not None:
        offsets.append(offset)
    for round_number in range(1000):
        slab.free(offsets[round_number % len(offsets)])
        assert slab.allocate(PAGE) == offsets[round_number % len(offsets)]
    assert sum(map(len, slab._open.values())) <= 4


def test_a_refused_adoption_changes_nothing() -> None:
    """A slot number out of range was noticed after the segment had been made: its units were lost."""
    slab = Slab(4 * UNIT, UNIT)
    with pytest.raises(Invalid, match="no slot 16"):
        slab.adopt(1, PAGE, [3, 16])
    assert slab.free_units() == [0, 1, 2, 3]
    assert slab.segments() == []
    assert slab.free_slots(PAGE) == 64


def test_freeing_what_is_no_slot_is_our_bug_and_stops() -> None:
    slab = Slab(4 * UNIT, UNIT, PAGE)
    offset = slab.allocate(PAGE)
    assert offset == PAGE
    for wrong in (0, offset + 1, offset + PAGE):
        with pytest.raises(AssertionError):
            slab.free(wrong)
    with pytest.raises(KeyError):
        slab.free(3 * UNIT)


def test_a_retired_segment_keeps_its_slots_and_takes_nothing_new() -> None:
    """A device failed fdatasync in one segment. Its slots were freed and handed out again, and every later write there
    failed as well: stores went on losing their SSD copy while other segments were fine."""
    slab = Slab(8 * MiB, unit_bytes=2 * MiB)
    first = [slab.allocate(512 * KiB) for _ in range(3)]
    slab.retire(0)
    later = [slab.allocate(512 * KiB) for _ in range(12)]
    assert None not in later
    assert all(offset is not None and offset >= 2 * MiB for offset in later)
    assert slab.allocate(512 * KiB) is None
    for offset in first:
        assert offset is not None
        slab.free(offset)
    assert slab.allocate(512 * KiB) is None, "a slot of the retired segment came back"
    slab.retire(0)
    assert slab.free_slots(512 * KiB) == 0
