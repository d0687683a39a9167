"""Room in a tier: take a free slot, else evict, else take a whole segment from another slot size.

One class for DRAM (one slab) and SSD (a slab a volume); a location is volume << 48 | offset. Ages are compared across
slot sizes, so that a model that just started gets its share from one that went quiet. Pure; loop only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.codes import Gone
from kvstore.index import Columns, place_of, ssd_location, volume_of
from kvstore.policy import EvictionPolicy
from kvstore.slab import Segment, Slab

TAKE_OVER_EVERY = 64
"""Allocations between two looks for a colder segment of another size: the look scans all rows (1-2 ms a million)."""

HEAT_ROWS = 1 << 16
"""Rows up to which a take-over asks for whole chains (measured: 3 ms for 32 000 rows, 15 ms for 128 000)."""


class Space:
    def __init__(
        self,
        slabs: list[Slab],
        column: str,
        columns: Columns,
        policy: EvictionPolicy,
        evict: Callable[[int, Gone], None],
    ) -> None:
        """`column`: "dram" or "ssd". `evict(row, why)` takes the row out of this tier at once and frees its slot."""
        self.slabs = slabs
        self.policy = policy
        self.usable = [True] * len(slabs)
        """False for a volume that is lost or read-only."""
        self._column = column
        self._columns = columns
        self._evict = evict
        self._since_look = TAKE_OVER_EVERY

    def allocate(self, size: int) -> int | None:
        """Location of a slot of `size` bytes, evicting what is oldest; None when nothing may be evicted."""
        location = self._take_free(size)
        if location is not None:
            return location
        if not any(self.usable):
            return None
        older_than = self._other_is_older(size)
        if older_than is not None and self._take_over(size, older_than):
            return self._take_free(size)
        row = self.policy.victim(size)
        if row is not None:
            self._evict(row, Gone.CAPACITY)
            return self._take_free(size)
        if self._take_over(size):
            return self._take_free(size)
        return None

    def prepare(self, size: int, count: int, older_than: int) -> None:
        """Evict ahead until `count` slots of `size` are free, so that the next batch only pops them.

        Only what was used before tick `older_than`: nothing is dropped ahead of need that was stored just now.
        """
        free = sum(slab.free_slots(size) for slab in self.slabs)
        while free < count and (age := self.policy.oldest(size)) is not None and age < older_than:
            row = self.policy.victim(size)
            assert row is not None
            self._evict(row, Gone.CAPACITY)
            free += 1

    def free(self, location: int) -> None:
        self.slabs[volume_of(location)].free(place_of(location))

    def segment(self, location: int) -> Segment:
        return self.slabs[volume_of(location)].segment_of(place_of(location))

    def fits(self, size: int) -> bool:
        """Whether this tier could ever hold a slot of `size` bytes."""
        return any(slab.fits(size) for slab in self.slabs)

    @property
    def used_bytes(self) -> int:
        return sum(slab.used_bytes for slab in self.slabs)

    def _take_free(self, size: int) -> int | None:
        """From the emptiest volume first, so that volumes fill evenly."""
        order = range(len(self.slabs))
        if len(self.slabs) > 1:
            order = sorted(order, key=lambda v: self.slabs[v].used_bytes / max(1, self.slabs[v].units))  # type: ignore[assignment]
        for volume in order:
            if self.usable[volume]:
                place = self.slabs[volume].allocate(size)
                if place is not None:
                    return ssd_location(volume, place)
        return None

    def _other_is_older(self, size: int) -> int | None:
        """Tick of the next victim of this size, where another size has an older one.

        Asked now and then only: a look scans every row, so the more rows there are the rarer it is.
        """
        self._since_look += 1
        if self._since_look < max(TAKE_OVER_EVERY, len(self._columns) // TAKE_OVER_EVERY):
            return None
        self._since_look = 0
        own = self.policy.oldest(size)
        sizes = {s for slab in self.slabs for s in slab.slot_sizes()} - {size}
        ages = [age for s in sizes if (age := self.policy.oldest(s)) is not None]
        return own if own is not None and ages and min(ages) < own else None

    def _take_over(self, size: int, colder_than: int | None = None) -> bool:
        """Empty the coldest run of segments of other sizes that holds nothing pinned, busy or reserved.

        With `colder_than` only where all of it was last used before that tick.
        """
        rows = self._columns.in_use(getattr(self._columns, self._column))
        locations = getattr(self._columns, self._column)[rows]
        heat = self._heat(rows)
        best: tuple[int, npt.NDArray[np.intp]] | None = None
        for volume, slab in enumerate(self.slabs):
            if self.usable[volume] and slab.fits(size):
                mine = locations >> 48 == volume
                places = locations[mine] & ((1 << 48) - 1)
                found = self._coldest(slab, size, rows[mine], places, heat[mine], slab.grows(size))
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
        if best is None or (colder_than is not None and best[0] >= colder_than):
            return False
        for row in best[1].tolist():
            self._evict(row, Gone.TAKEOVER)
        return True

    def _heat(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """When each row or anything that hangs on it was last used: the start of a chain is as hot as its tail.

        Ticks climb 1, 2, 4... parents at a time: a pass a doubling of the depth, not one a level. Above HEAT_ROWS rows
        their own ticks must do: the loop cannot be held for so long.
        """
        columns = self._columns
        if len(rows) > HEAT_ROWS:
            return columns.tick[rows]
        heat = np.zeros(len(columns.keys), np.int64)
        heat[rows] = columns.tick[rows]
        ancestor = columns.parent[: len(columns.keys)].astype(np.intp)
        below = rows
        while len(below := below[ancestor[below] >= 0]):
            above = ancestor[below]
            np.maximum.at(heat, above, heat[below])
            ancestor[below] = ancestor[above]
        return heat[rows]

    def _coldest(
        self,
        slab: Slab,
        size: int,
        rows: npt.NDArray[np.intp],
        places: npt.NDArray[np.int64],
        ticks: npt.NDArray[np.int64],
        may_grow: bool,
    ) -> tuple[int, npt.NDArray[np.intp]] | None:
        """(tick of its newest chunk, its rows) for the coldest window of units that a segment of `size` would need."""
        columns = self._columns
        first = np.full(slab.units, -1, np.intp)
        for segment in slab.segments():
            first[segment.first_unit : segment.first_unit + segment.units] = segment.first_unit
        home = first[places // slab.unit_bytes]
        heat = np.zeros(slab.units, np.int64)
        np.maximum.at(heat, home, ticks)
        count = np.bincount(home, minlength=slab.units)
        held = np.bincount(home, weights=(columns.pins[rows] > 0) | (columns.busy[rows] > 0), minlength=slab.units)
        open_ = np.zeros(slab.units, bool)
        open_[slab.free_units(may_grow)] = True
        for segment in slab.segments():
            at = segment.first_unit
            if segment.slot_bytes != size and count[at] == segment.used and not held[at]:
                open_[at : at + segment.units] = True
                heat[at : at + segment.units] = heat[at]
        need = slab.units_for(size)
        windows = [
            (int(heat[start : start + need].max()), start)
            for start in range(slab.units - need + 1)
            if open_[start : start + need].all()
        ]
        if not windows:
            return None
        coldest, start = min(windows)
        return coldest, rows[np.isin(home, first[start : start + need])]
