"""Taking chunks out on request: rm, purge of a root. Nothing removed is served again, now or after a restart."""

from __future__ import annotations

from kvstore.codes import Gone
from kvstore.index import BUSY_FILL, NOWHERE, READY, Root, Series, place_of, volume_of
from kvstore.keys import NO_PARENT
from kvstore.ledger import Event
from kvstore.planner.jobs import Delete, Work
from kvstore.planner.state import State
from kvstore.planner.stores import Stores


class Removal:
    def __init__(self, state: State, stores: Stores) -> None:
        self._state, self._stores = state, stores

    def remove(self, series: Series, key: bytes) -> Work:
        """Drop one chunk from every tier, known or not; the deletes in the answer must be waited for.

        There is one for every volume: evictions leave records on disk, so a volume that once held the chunk may still
        have a copy that a restart would bring back. Those without a place (0) only forbid older records.
        The caller has made sure that no I/O is under way for it (`State.columns.busy`).
        """
        work, columns = Work(), self._state.columns
        row = series.rows.get(key)
        location = NOWHERE if row is None else int(columns.ssd[row])
        for volume in range(len(self._state.ssd.slabs)):
            place = place_of(location) if location >= 0 and volume_of(location) == volume else 0
            item = self._state.named(series, key, NO_PARENT, place, self._state.next_sequence - 1)
            work.deletes.append(Delete(volume, item))
        work.deletes.sort(key=lambda delete: delete.item.place == 0)  # the record itself first, whatever fails later
        if row is not None:
            assert not columns.busy[row], "wait until the chunk is idle"
            self._record(series, key, Gone.REMOVED)
            self._drop(row, Gone.REMOVED, reuse=False)
        return work

    def deleted(self, location: int) -> None:
        """The record at this place is gone for good: the place may be used again. Nothing to do for place 0."""
        if place_of(location):
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
        for session in state.sessions.values():
            for chunk in [c for c in session.joint.values() if c.series.root == root.digest]:
                self._stores.give_up(session, chunk)  # the shards committed already are of before the purge
        for series in root.series.values():
            for key, row in list(series.rows.items())[::-1]:  # children first, or each parent's children are searched
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
