"""Slot allocation for the arena and for SSD volumes: one pure allocator over byte offsets.

The space is cut into units; a segment is a run of whole units that serves one slot size; a segment without used slots
goes back to the pool at once, so a new slot size finds room. The lowest free slot of the lowest open segment is taken
first: slots of a batch lie side by side, which the SSD turns into few large writes.
Not covered: who to evict (policy), when (planner). Not thread-safe. Source: slabs after Bonwick (USENIX 1994).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.errors import Invalid
from kvstore.units import PAGE_BYTES, MiB

UNIT_BYTES = 64 * MiB
SLOTS_PER_SEGMENT = 4
"""At least this many, so that the space lost to rounding at a segment's end stays below a quarter."""


@dataclass(slots=True, eq=False)
class Segment:
    """`units` units from `first_unit` on, cut into `slots` slots."""

    first_unit: int
    units: int
    slot_bytes: int
    base: int
    slots: int
    fresh: int = 0
    """Slots below this number were handed out at least once."""
    freed: list[int] = field(default_factory=list)
    """Heap of free slot numbers below `fresh`."""
    retired: bool = False
    """Its place on the disk failed: what is in it stays readable, nothing new goes in, and it never comes back."""
    unbacked: bool = False
    """The disk had no room for it: nothing new goes in, and its units count as never taken once it is empty."""

    @property
    def used(self) -> int:
        return self.fresh - len(self.freed)

    @property
    def free(self) -> int:
        return self.slots - self.used


class Slab:
    """`header_bytes` are left free at the start of each segment (SSD volumes keep the segment's description there)."""

    def __init__(self, size_bytes: int, unit_bytes: int = UNIT_BYTES, header_bytes: int = 0) -> None:
        if unit_bytes % PAGE_BYTES or header_bytes % PAGE_BYTES:
            raise Invalid("unit and header must be multiples of 4 KiB")
        self.unit_bytes = unit_bytes
        self.header_bytes = header_bytes
        self.units = size_bytes // unit_bytes
        self._free_units = list(range(self.units))
        self._by_unit: dict[int, Segment] = {}
        self._open: dict[int, list[int]] = {}
        """slot size -> heap of first units of segments that may have free slots (stale entries are skipped)."""
        self._free_slots: dict[int, int] = {}
        self._taken_before: set[int] = set()
        """Units that were in use once: on a disk they are allocated already."""
        self.may_take: int | None = None
        """Units never used before that may still be taken: what the disk has room for. None: all."""
        self.used_bytes = 0

    def fits(self, slot_bytes: int) -> bool:
        """Whether the whole space could ever hold one such slot."""
        return self.units_for(slot_bytes) <= self.units

    def allocate(self, slot_bytes: int) -> int | None:
        """Offset of a free slot, or None when none is free and no run of free units is left (see `may_take`)."""
        segment = self._open_segment(slot_bytes)
        if segment is None:
            segment = self._new_segment(slot_bytes, self.free_units(self.grows(slot_bytes)))
            if segment is None:
                return None
        if segment.freed:
            number = heapq.heappop(segment.freed)
        else:
            number = segment.fresh
            segment.fresh += 1
        if not segment.free:
            heapq.heappop(self._open[slot_bytes])  # else each later `free` would push it once more
        self._free_slots[slot_bytes] -= 1
        self.used_bytes += slot_bytes
        return segment.base + number * slot_bytes

    def grows(self, slot_bytes: int) -> bool:
        """Whether a segment of this slot size may take units that were never used before."""
        return self.may_take is None or self.may_take >= self.units_for(slot_bytes)

    def free(self, offset: int) -> Segment | None:
        """Give a slot back. Returns its segment when that became empty and went back to the pool."""
        segment = self.segment_of(offset)
        number, rest = divmod(offset - segment.base, segment.slot_bytes)
        assert rest == 0, f"offset {offset} is inside a slot"
        assert 0 <= number < segment.fresh, f"offset {offset} is no slot in use"
        if segment.retired:
            return None
        heapq.heappush(segment.freed, number)
        self.used_bytes -= segment.slot_bytes
        if not segment.unbacked:
            self._free_slots[segment.slot_bytes] += 1
        if segment.used == 0:
            self._release(segment)
            return segment
        heap = self._open.setdefault(segment.slot_bytes, [])
        if segment.free == 1 and not segment.unbacked:
            heapq.heappush(heap, segment.first_unit)
        return None

    def segment_of(self, offset: int) -> Segment:
        return self._by_unit[offset // self.unit_bytes]

    def segments(self) -> list[Segment]:
        return sorted(set(self._by_unit.values()), key=lambda s: s.first_unit)

    def free_slots(self, slot_bytes: int) -> int:
        """Slots that `allocate` can hand out now, in open segments and free units (contiguity aside)."""
        need = self.units_for(slot_bytes)
        return self._free_slots.get(slot_bytes, 0) + len(self._free_units) // need * self._slots_in(slot_bytes, need)

    def slot_sizes(self) -> list[int]:
        return [size for size in self._free_slots if any(s.slot_bytes == size for s in self._by_unit.values())]

    def free_units(self, may_grow: bool = True) -> list[int]:
        """Without `may_grow` only those that were in use before."""
        return [unit for unit in self._free_units if may_grow or unit in self._taken_before]

    def hide_unit(self, unit: int) -> bool:
        """Keep a free unit from being allocated (it is being written for the first time). False where it is in use."""
        if unit not in self._free_units:
            return False
        self._free_units.remove(unit)
        return True

    def show_unit(self, unit: int) -> None:
        insort(self._free_units, unit)
        self._taken_before.add(unit)

    def retire(self, unit: int) -> None:
        """Never hand out a slot of this unit's segment again (its device failed a sync). Idempotent."""
        segment = self._by_unit.get(unit)
        if segment is None:
            self.hide_unit(unit)
        elif not segment.retired:
            segment.retired = True
            self._free_slots[segment.slot_bytes] -= segment.free
            self.used_bytes += segment.free * segment.slot_bytes
            segment.fresh, segment.freed = segment.slots, []

    def unback(self, unit: int) -> None:
        """The disk had no room for this unit's segment: no slot of it is handed out any more. Idempotent."""
        segment = self._by_unit.get(unit)
        if segment is not None and not segment.unbacked and not segment.retired:
            segment.unbacked = True
            self._free_slots[segment.slot_bytes] -= segment.free
            self._taken_before -= set(range(segment.first_unit, segment.first_unit + segment.units))

    def adopt(self, first_unit: int, slot_bytes: int, used: Iterable[int]) -> None:
        """Take over a segment found on disk, with the slot numbers that hold live records (ascending or not)."""
        need = self.units_for(slot_bytes)
        run = range(first_unit, first_unit + need)
        if any(unit in self._by_unit or not 0 <= unit < self.units for unit in run):
            raise Invalid(f"segment at unit {first_unit} overlaps another one or lies outside of the volume")
        taken = set(used)
        if taken and not 0 <= min(taken) <= max(taken) < self._slots_in(slot_bytes, need):
            raise Invalid(f"segment at unit {first_unit} has no slot {min(taken) if min(taken) < 0 else max(taken)}")
        segment = self._make(first_unit, slot_bytes)
        segment.fresh = max(taken, default=-1) + 1
        segment.freed = [n for n in range(segment.fresh) if n not in taken]
        self._free_slots[slot_bytes] -= segment.used
        self.used_bytes += segment.used * slot_bytes
        if not taken:
            self._release(segment)

    def units_for(self, slot_bytes: int) -> int:
        """Units of one segment of this slot size. Raises Invalid where the size is no multiple of 4 KiB."""
        if slot_bytes < PAGE_BYTES or slot_bytes % PAGE_BYTES:
            raise Invalid(f"slot size {slot_bytes} is not a positive multiple of 4 KiB")
        return max(1, -(-(slot_bytes * SLOTS_PER_SEGMENT + self.header_bytes) // self.unit_bytes))

    def _slots_in(self, slot_bytes: int, units: int) -> int:
        return (units * self.unit_bytes - self.header_bytes) // slot_bytes

    def _open_segment(self, slot_bytes: int) -> Segment | None:
        heap = self._open.get(slot_bytes)
        while heap:
            segment = self._by_unit.get(heap[0])
            if (
                segment is not None
                and segment.slot_bytes == slot_bytes
                and segment.first_unit == heap[0]
                and segment.free
                and not segment.unbacked
            ):
                return segment
            heapq.heappop(heap)
        return None

    def _new_segment(self, slot_bytes: int, units: list[int]) -> Segment | None:
        need = self.units_for(slot_bytes)
        for i in range(len(units) - need + 1):
            if units[i + need - 1] - units[i] == need - 1:
                return self._make(units[i], slot_bytes)
        return None

    def _make(self, first_unit: int, slot_bytes: int) -> Segment:
        need = self.units_for(slot_bytes)
        base = first_unit * self.unit_bytes + self.header_bytes
        segment = Segment(first_unit, need, slot_bytes, base, self._slots_in(slot_bytes, need))
        for unit in range(first_unit, first_unit + need):
            self._by_unit[unit] = segment
            self._free_units.remove(unit)
            if unit not in self._taken_before and self.may_take is not None:
                self.may_take -= 1
            self._taken_before.add(unit)
        self._free_slots[slot_bytes] = self._free_slots.get(slot_bytes, 0) + segment.slots
        heapq.heappush(self._open.setdefault(slot_bytes, []), first_unit)
        return segment

    def _release(self, segment: Segment) -> None:
        for unit in range(segment.first_unit, segment.first_unit + segment.units):
            del self._by_unit[unit]
            insort(self._free_units, unit)
        if not segment.unbacked:
            self._free_slots[segment.slot_bytes] -= segment.slots
