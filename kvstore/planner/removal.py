"""Taking chunks out on request: rm, purge of a root. Nothing removed is served again, now or after a restart."""

from __future__ import annotations

from kvstore.codes import Gone
from kvstore.index import BUSY_FILL, READY, Root, Series
from kvstore.ledger import Event
from kvstore.planner.jobs import Delete, Work
from kvstore.planner.state import State


class Removal:
    def __init__(self, state: State) -> None:
        self._state = state

    def remove(self, series: Series, key: bytes) -> Work:
        """Drop one chunk from every tier; the record's delete is in the answer and must be waited for.

        The caller has made sure that no I/O is under way for it (`State.columns.busy`).
        """
        work = Work()
        row = series.rows.get(key)
        if row is None:
            return work
        columns = self._state.columns
        assert not columns.busy[row], "wait until the chunk is idle"
        self._record(series, key, Gone.REMOVED)
        if columns.ssd[row] >= 0:
            work.deletes.append(Delete(self._state.volume(row), self._state.item(row)))
        self._drop(row, Gone.REMOVED, reuse=False)
        return work

    def deleted(self, location: int) -> None:
        """The record at this place is gone for good: the place may be used again."""
        self._state.ssd.free(location)

    def purge(self, root: Root) -> tuple[int, int]:
        """Drop all chunks of a root. Returns (chunks, sequence): records below that sequence are dead on every volume.

        The caller writes the tombstones before it reports success. Reservations made before are refused at commit;
        chunks that an I/O thread holds are dead at once and go when it ends.
        """
        state = self._state
        sequence = state.next_sequence
        state.next_sequence += 1
        root.epoch_sequence = sequence
        removed = 0
        for series in root.series.values():
            for key, row in list(series.rows.items()):
                self._record(series, key, Gone.PURGED)
                self._drop(row, Gone.PURGED, reuse=True)
                removed += 1
        return removed, sequence

    def _drop(self, row: int, why: Gone, reuse: bool) -> None:
        """Out of both tiers, whatever the order of tiers leaves behind; leases on it find a changed generation."""
        state, columns = self._state, self._state.columns
        resident = bool(columns.flags[row] & READY)
        filling = bool(columns.busy[row] & BUSY_FILL)
        if columns.ssd[row] >= 0:
            if filling:
                reuse = False  # an I/O thread reads that place
            state.leave_ssd(row, why, reuse)
        if resident:
            state.leave_dram(row, why)
        elif filling:
            state.close_slot(int(columns.dram[row]))
            state.forget(row)

    def _record(self, series: Series, key: bytes, why: Gone) -> None:
        state = self._state
        state.ledger.record(Event(state.clock.now(), "removed", why.name.lower(), "all", series.root, key))
