"""The planner's shared state and the few moves that keep it consistent: every change of place goes through here.

Invariants (the stateful model in tests/planner checks them after every step):
- a key is in its series exactly while its row is in a tier or being filled: never in neither tier;
- a slot's generation is odd while it is free or writable and even while its bytes may be read;
- a row with pins or I/O keeps its number; removed while held it is DEAD and goes when the last holder lets go;
- used bytes of each slab equal the rows, pending chunks and dead slots that name them.
Pure: the control page is two arrays handed in. Loop only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.backend import Item
from kvstore.clock import Clock
from kvstore.codes import Gone
from kvstore.index import (
    BUSY_FILL,
    BUSY_WRITE,
    DEAD,
    NOWHERE,
    ORPHAN,
    READY,
    Columns,
    Root,
    Series,
    place_of,
    volume_of,
)
from kvstore.keys import NO_PARENT
from kvstore.layout import one_part_pool, slot_layout
from kvstore.ledger import Event, Ledger
from kvstore.planner.budget import WriteBudget
from kvstore.planner.records import Limits, Session
from kvstore.planner.space import Space
from kvstore.policy import POLICIES
from kvstore.record import HEADER_BYTES
from kvstore.slab import Slab
from kvstore.units import PAGE_BYTES

_REASONS = {why: why.name.lower() for why in Gone}
_LABELS = {(tier, why): f"{tier}/{reason}" for tier in ("dram", "ssd") for why, reason in _REASONS.items()}
_PAGE_SHIFT = PAGE_BYTES.bit_length() - 1
_ONE = np.uint64(1)


class State:
    """`generations` (uint64) and `parts_ready` (uint32): one entry a 4 KiB page of the arena, the control page."""

    def __init__(
        self,
        arena: Slab,
        volumes: Sequence[Slab],
        generations: npt.NDArray[np.uint64],
        parts_ready: npt.NDArray[np.uint32],
        clock: Clock,
        ledger: Ledger,
        limits: Limits,
        policy: str = "lru",
        budget: WriteBudget | None = None,
    ) -> None:
        self.clock, self.ledger, self.limits = clock, ledger, limits
        self.generations, self.parts_ready = generations, parts_ready
        self.budget = budget or WriteBudget()
        self.columns = Columns()
        self.arena_bytes = arena.units * arena.unit_bytes
        columns, kind = self.columns, POLICIES[policy]
        dram = kind(columns, lambda row: self.series_of(row).slot_bytes, columns.held)
        ssd = kind(columns, lambda row: self.series_of(row).slot_bytes + HEADER_BYTES, self._held_on_ssd)
        self.dram = Space([arena], "dram", columns, dram, self.leave_dram)
        self.ssd = Space(list(volumes), "ssd", columns, ssd, self.leave_ssd)
        self.roots: dict[bytes, Root] = {}
        self.handles: dict[int, Root] = {}
        self.series: list[Series] = []
        self.free_series: list[int] = []
        """Numbers in `series` that no row names any more: they may be used again."""
        self.sessions: dict[bytes, Session] = {}
        self.pinned_bytes = 0
        """Arena bytes of rows with at least one pin."""
        self.reserved_bytes = 0
        """Arena bytes of pending chunks."""
        self.dirty_bytes = 0
        """Arena bytes whose write to SSD is wanted and not done."""
        self.next_sequence = 1
        self._tick = 0
        self._number = 0

    # ---- names -------------------------------------------------------------------------------------------------

    def series_of(self, row: int) -> Series:
        return self.series[int(self.columns.series[row])]

    def _held_on_ssd(self, row: int) -> bool:
        """A place on a volume that takes no writes is of no use to anybody else: what lies there stays readable."""
        return self.columns.held(row) or not self.ssd.usable[volume_of(int(self.columns.ssd[row]))]

    def tick(self) -> int:
        self._tick += 1
        return self._tick

    def advance(self, ticks: int) -> None:
        """Ticks up to here are taken (recovery hands them out in bulk)."""
        self._tick = max(self._tick, ticks)

    def number(self) -> int:
        """A new lease or reservation number, unique in this daemon."""
        self._number += 1
        return self._number

    def session(self, name: bytes) -> Session:
        return self.sessions[name]

    def item(self, row: int, location: int = NOWHERE, sequence: int = 0) -> Item:
        """The chunk as backends see it: at `location` with `sequence` if given, else at its SSD place if it has one."""
        series, columns = self.series_of(row), self.columns
        parent = int(columns.parent[row])
        parent_key = columns.key(parent) if parent >= 0 else series.orphans.get(row, NO_PARENT)
        if location < 0 and columns.ssd[row] >= 0:
            location, sequence = int(columns.ssd[row]), int(columns.sequence[row])
        place = place_of(location) if location >= 0 else 0
        return self.named(series, columns.key(row), parent_key, place, sequence)

    @staticmethod
    def named(series: Series, key: bytes, parent: bytes = NO_PARENT, place: int = 0, sequence: int = 0) -> Item:
        """An item by its name. The layout of an unopened root's is one part: enough to delete it."""
        layout = series.layout or slot_layout(one_part_pool(series.slot_bytes))
        return Item(series.root, series.pool, key, layout, parent, place, sequence)

    def pages(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return offsets >> _PAGE_SHIFT

    # ---- arena slots -------------------------------------------------------------------------------------------

    def close_slot(self, offset: int) -> None:
        """From now on no reader takes these bytes for good (odd generation)."""
        self.generations[offset >> _PAGE_SHIFT] |= _ONE

    def open_slot(self, offset: int, parts: int) -> int:
        """The slot may be read under the returned generation, as far as `parts` parts."""
        page = offset >> _PAGE_SHIFT
        self.parts_ready[page] = parts
        generation = self.generations[page] = self.generations[page] + _ONE
        return int(generation)

    def take_slot(self, slot_bytes: int) -> int | None:
        """A closed slot, evicting if need be."""
        offset = self.dram.allocate(slot_bytes)
        if offset is not None:
            self.close_slot(offset)
        return offset

    # ---- rows --------------------------------------------------------------------------------------------------

    def add_row(self, series: Series, key: bytes, parent: bytes) -> int:
        """A new row, linked to its parent and to children that waited for it; the caller puts it into a tier now."""
        parent_row = series.rows.get(parent, NOWHERE) if parent != NO_PARENT else NOWHERE
        row = self.columns.add(series.number, key, parent_row, self.tick())
        series.rows[key] = row
        if parent_row < 0 and parent != NO_PARENT:
            self.orphan(series, row, parent)
        self.adopt_children(series, row, key)
        return row

    def adopt_children(self, series: Series, row: int, key: bytes) -> None:
        """Orphans that waited for this key hang on its row again."""
        for child in series.waiting.pop(key, ()):
            del series.orphans[child]
            self.columns.flags[child] &= 0xFF ^ ORPHAN
            self.columns.parent[child] = row
            self.dram.policy.relinked(child)
            self.ssd.policy.relinked(child)

    def orphan(self, series: Series, row: int, missing: bytes) -> None:
        """The row's parent is not here: hidden until it is, where the pool's rule asks for whole chains."""
        if series.rule == "all":
            self.columns.flags[row] |= ORPHAN
            series.orphans[row] = missing
            series.waiting.setdefault(missing, set()).add(row)

    def leave_dram(self, row: int, why: Gone) -> None:
        """Take a chunk out of DRAM; without an SSD copy it leaves the system."""
        self._note("evictions_total", "dram", row, why)
        self.dram.policy.removed(row)
        offset = int(self.columns.dram[row])
        self.close_slot(offset)
        self.columns.flags[row] &= 0xFF ^ READY
        if not self.columns.busy[row]:
            self.columns.dram[row] = NOWHERE
            self.dram.free(offset)
        if self.columns.ssd[row] < 0:
            self.forget(row)

    def leave_ssd(self, row: int, why: Gone, reuse: bool = True) -> None:
        """Take a chunk off its volume; without a DRAM copy it leaves the system. `reuse`: its place is free at once."""
        self._note("evictions_total", "ssd", row, why)
        self.ssd.policy.removed(row)
        location = int(self.columns.ssd[row])
        self.columns.ssd[row] = NOWHERE
        if reuse:
            self.ssd.free(location)
        if not self.columns.flags[row] & READY and not self.columns.busy[row] & BUSY_FILL:
            self.forget(row)

    def forget(self, row: int) -> None:
        """The chunk left the system: no look-up finds it, children are orphans, the row goes when nobody holds it."""
        series, columns = self.series_of(row), self.columns
        key = columns.key(row)
        if series.rows.get(key) != row:
            return
        del series.rows[key]
        missing = series.orphans.pop(row, None)
        if missing is not None:
            waiting = series.waiting[missing]
            waiting.discard(row)
            if not waiting:
                del series.waiting[missing]
        if self.dram.policy.has_children(row) or self.ssd.policy.has_children(row):
            for child in columns.children(row).tolist():
                for policy in (self.dram.policy, self.ssd.policy):
                    policy.unlinked(child)
                    if series.rule == "all":
                        policy.orphaned(child)
                columns.parent[child] = NOWHERE
                self.orphan(series, child, key)
        columns.parent[row] = NOWHERE  # a dead row may outlive its parent, whose number is then another chunk's
        columns.flags[row] |= DEAD
        self.settle(row)

    def settle(self, row: int) -> None:
        """Give a dead row's slot and number back once no lease and no I/O holds it."""
        columns = self.columns
        if not columns.flags[row] & DEAD or columns.busy[row]:
            return
        offset = int(columns.dram[row])
        if offset >= 0:
            columns.dram[row] = NOWHERE
            self.dram.free(offset)
        if not columns.pins[row]:
            columns.release(row)

    # ---- pins --------------------------------------------------------------------------------------------------

    def pin(self, rows: npt.NDArray[np.intp]) -> None:
        """One more holder for each row (a row named twice is pinned twice)."""
        pins = self.columns.pins
        before = pins[rows]
        if len(set(rows.tolist())) == len(rows):
            pins[rows] = before + 1
            new = rows[before == 0]
        else:
            np.add.at(pins, rows, 1)
            new = np.unique(rows[before == 0])
        if len(new):
            self.pinned_bytes += self._slot_bytes(new)

    def unpin(self, rows: npt.NDArray[np.intp]) -> None:
        pins = self.columns.pins
        if len(set(rows.tolist())) == len(rows):
            pins[rows] -= 1
            free = rows[pins[rows] == 0]
        else:
            np.subtract.at(pins, rows, 1)
            free = np.unique(rows[pins[rows] == 0])
        if len(free):
            self.pinned_bytes -= self._slot_bytes(free)
            self._let_go(free)

    def idle(self, row: int, bit: int) -> None:
        """An I/O on the row's arena slot has ended."""
        self.columns.busy[row] &= 0xFF ^ bit
        if self.columns.flags[row] & DEAD:
            self.settle(row)
        self.dram.policy.released_one(row)
        self.ssd.policy.released_one(row)

    def _let_go(self, rows: npt.NDArray[np.intp]) -> None:
        dead = rows[self.columns.flags[rows] & DEAD > 0]
        for row in dead.tolist():
            self.settle(row)
        self.dram.policy.released(rows)
        self.ssd.policy.released(rows)

    def _slot_bytes(self, rows: npt.NDArray[np.intp]) -> int:
        numbers = self.columns.series[rows].tolist()
        first = self.series[numbers[0]].slot_bytes
        return first * len(numbers) if min(numbers) == max(numbers) else sum(self.series[n].slot_bytes for n in numbers)

    def room_for(self, session: Session, slot_bytes: int) -> int:
        """Slots that this session may still hold: its own share, and the share of all."""
        own = self.limits.session_share * self.arena_bytes - session.held_bytes
        total = self.limits.all_share * self.arena_bytes - self.pinned_bytes - self.reserved_bytes
        return max(0, int(min(own, total) // slot_bytes))

    # ---- notes -------------------------------------------------------------------------------------------------

    def _note(self, counter: str, tier: str, row: int, why: Gone) -> None:
        self.ledger.count(counter, _LABELS[tier, why])
        series = self.series_of(row)
        self.ledger.record(
            Event(self.clock.now(), "evicted", _REASONS[why], tier, series.root, self.columns.key(row))
        )  # fmt: skip

    # ---- for tests and status ----------------------------------------------------------------------------------

    def volume(self, row: int) -> int:
        return volume_of(int(self.columns.ssd[row]))

    def writing(self, row: int) -> bool:
        return bool(self.columns.busy[row] & BUSY_WRITE)
