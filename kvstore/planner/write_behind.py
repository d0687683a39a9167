"""Write-behind: which committed chunks go to SSD, where to, and what it means when a write has ended."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.codes import Gone
from kvstore.errors import Full, KVStoreError
from kvstore.index import BUSY_WRITE, DEAD, ssd_location, volume_of
from kvstore.ledger import Event
from kvstore.planner.jobs import Delete, Work, Write
from kvstore.planner.state import State
from kvstore.record import HEADER_BYTES


class WriteBehind:
    def __init__(self, state: State) -> None:
        self._state = state

    def plan(self, rows: Sequence[int], work: Work, retried: bool = False) -> None:
        """Give each row a place on SSD and queue its write; rows without one stay in DRAM only, counted."""
        state, columns = self._state, self._state.columns
        if not state.ssd.slabs:
            return
        now_s = state.clock.now()
        for row in rows:
            slot_bytes = state.series_of(row).slot_bytes
            if columns.ssd[row] >= 0 or columns.busy[row] & BUSY_WRITE:
                continue
            if not state.budget.take(slot_bytes + HEADER_BYTES, now_s):
                self._drop(row, Gone.SSD_BUDGET)
                continue
            location = state.ssd.allocate(slot_bytes + HEADER_BYTES)
            if location is None:
                self._drop(row, Gone.SSD_FULL)
                continue
            item = state.item(row, location, state.next_sequence)
            state.next_sequence += 1
            columns.busy[row] |= BUSY_WRITE
            state.dirty_bytes += slot_bytes
            segment = state.ssd.segment(location)
            place = (segment.first_unit, segment.units, segment.slot_bytes)
            work.writes.append(Write(row, volume_of(location), item, int(columns.dram[row]), place, retried))

    def written(self, ended: Sequence[tuple[Write, KVStoreError | None]]) -> Work:
        """Writes of one device write have ended, each with its error or None.

        A disk that is full gets one more try, with a slot that an older chunk gives up (fault 11).
        """
        state, columns, work = self._state, self._state.columns, Work()
        landed: list[int] = []
        for write, error in ended:
            row, location = write.row, ssd_location(write.volume, write.item.place)
            state.dirty_bytes -= state.series_of(row).slot_bytes
            if error is not None:
                state.ledger.count("write_errors_total", error.code)
                state.ssd.free(location)
            elif columns.flags[row] & DEAD:
                work.deletes.append(Delete(write.volume, write.item))
            else:
                columns.ssd[row] = location
                columns.sequence[row] = write.item.sequence
                landed.append(row)
                state.ledger.count("ssd_written_bytes_total", "", write.segment[2])
        state.ledger.count("ssd_written_chunks_total", "", len(landed))
        state.ssd.policy.added(landed)  # together: a parent is no leaf where its child landed with it
        for write, error in ended:
            dead = bool(columns.flags[write.row] & DEAD)
            state.idle(write.row, BUSY_WRITE)
            if error is None or dead:
                continue
            if isinstance(error, Full) and not write.retried:
                self.plan([write.row], work, retried=True)
            else:
                self._drop(write.row, Gone.IO_ERROR)
        return work

    def _drop(self, row: int, why: Gone) -> None:
        """The wanted SSD copy is not made: counted, and the chunk stays in DRAM only."""
        state = self._state
        state.ledger.count("ssd_writes_dropped_total", why.name.lower())
        root, key = state.series_of(row).root, state.columns.key(row)
        state.ledger.record(Event(state.clock.now(), "dropped", why.name.lower(), "ssd", root, key))
