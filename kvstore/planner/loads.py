"""Look-up, lease, fill, release: the reading half of the planner."""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvstore.codes import Gone, Load, Tier
from kvstore.errors import Closed, Corrupt, Invalid, KVStoreError, Throttled
from kvstore.index import BUSY_FILL, DEAD, NOWHERE, ORPHAN, READY, SICK, Series, ssd_location, volume_of
from kvstore.keys import KEY_BYTES
from kvstore.ledger import Event
from kvstore.planner.jobs import Delete, Read, Work
from kvstore.planner.records import Lease, Session
from kvstore.planner.state import State

_HIDDEN = ORPHAN | SICK
_LABELS = {int(code): code.name.lower() for code in Load}


@lru_cache(maxsize=512)
def _unpacker(size_bytes: int) -> struct.Struct:
    """Cuts so many bytes into keys, all at once."""
    return struct.Struct(f"{KEY_BYTES}s" * (size_bytes // KEY_BYTES))


class Loads:
    def __init__(self, state: State) -> None:
        self._state = state
        self._sick: dict[int, tuple[float, bytes]] = {}
        """Row -> (until, key): hidden after its tier failed to deliver it, so that the next look-up is a miss."""

    def lookup(self, series: Series, keys: bytes) -> bytes:
        """Tier of each key; rule `all` stops at the first absent one."""
        rows = self._find(series, keys, stop=series.rule == "all")
        if not rows:
            return b""
        columns = self._state.columns
        present = np.array(rows)
        ready = columns.flags[present] & READY
        tiers = np.where(ready > 0, np.uint8(Tier.DRAM), np.uint8(Tier.SSD))
        if min(rows) < 0:
            tiers[present < 0] = Tier.NONE
        return tiers.astype(np.uint8).tobytes()

    def lease(
        self, session: Session, series: Series, keys: bytes, layerwise: bool, ttl_s: float
    ) -> tuple[Lease | None, bytes, npt.NDArray[np.int64], npt.NDArray[np.uint64], Work]:
        """Pin what is present (rule `all`: its leading run) and start fills for what is on SSD only.

        Returns (lease or None, Load code a key, arena offset a key, generation a key, fills to run).
        Nobody waits: what does not fit now is a miss with its reason, and what was pinned before it stays granted.
        """
        state, count = self._state, len(keys) // KEY_BYTES
        if len(session.leases) >= state.limits.leases:
            raise Throttled(f"this session holds {len(session.leases)} leases, the limit: release some")
        leading = series.rule == "all"
        found = self._find(series, keys, stop=leading)
        codes = bytearray([Load.MISS_AFTER_GAP if leading else Load.MISS_UNKNOWN]) * count
        if leading and len(found) < count:
            codes[len(found)] = Load.MISS_UNKNOWN
        room = state.room_for(session, series.slot_bytes)
        if len(found) == count <= room and count and min(found) >= 0:
            rows = np.array(found)
            if (state.columns.flags[rows] & READY).all():
                return self._all_ready(session, series, rows, ttl_s)
        where = [i for i, row in enumerate(found) if row >= 0]
        if len(where) > room:
            for i in where[room:]:
                codes[i] = Load.MISS_QUOTA
            where = where[:room]
        offsets, generations = np.zeros(count, np.int64), np.zeros(count, np.uint64)
        work = Work()
        if where:
            rows = np.array([found[i] for i in where])
            state.pin(rows)
            granted = self._grant(rows, codes, where, layerwise, leading, work)
            if granted < len(rows):
                state.unpin(rows[granted:])
                rows, where = rows[:granted], where[:granted]
        for code in set(codes):
            state.ledger.count("loads_total", _LABELS[code], codes.count(code))
        if not where:
            return None, bytes(codes), offsets, generations, work
        if work.reads:
            work.ahead = (series, len(work.reads), state.tick())
        lease = self._sign(session, series, rows, ttl_s)
        offsets[where] = state.columns.dram[rows]
        generations[where] = state.generations[state.pages(state.columns.dram[rows])]
        return lease, bytes(codes), offsets, generations, work

    def _all_ready(
        self, session: Session, series: Series, rows: npt.NDArray[np.intp], ttl_s: float
    ) -> tuple[Lease | None, bytes, npt.NDArray[np.int64], npt.NDArray[np.uint64], Work]:
        """The most frequent case of `lease` without its case distinctions: every chunk is in DRAM."""
        state = self._state
        state.pin(rows)
        state.ledger.count("loads_total", _LABELS[Load.DRAM], len(rows))
        offsets = state.columns.dram[rows]
        generations = state.generations[state.pages(offsets)]
        lease = self._sign(session, series, rows, ttl_s)
        return lease, bytes([Load.DRAM]) * len(rows), offsets, generations, Work()

    def _sign(self, session: Session, series: Series, rows: npt.NDArray[np.intp], ttl_s: float) -> Lease:
        """The lease on pinned rows; the chain's tail is touched."""
        state = self._state
        state.columns.tick[rows[-1]] = state.tick()
        lease = Lease(state.number(), rows, state.clock.now() + ttl_s, len(rows) * series.slot_bytes)
        session.leases[lease.number] = lease
        session.held_bytes += lease.size_bytes
        return lease

    def release(self, session: Session, number: int) -> None:
        """End a lease; one that has expired or never was is ignored."""
        lease = session.leases.pop(number, None)
        if lease is not None:
            session.held_bytes -= lease.size_bytes
            self._state.unpin(lease.rows)

    def renew(self, session: Session, number: int, ttl_s: float) -> None:
        lease = session.leases.get(number)
        if lease is None:
            raise Closed(f"lease {number} has expired: its chunks may be gone, ask again")
        lease.expires_s = self._state.clock.now() + ttl_s

    def filled(self, read: Read, found: bool, error: KVStoreError | None) -> Work:
        """A fill has ended. `found` is False where another record, or none, was at the place.

        The I/O thread has set parts_ready already (its end value, or FAILED) and woken the waiters.
        """
        state, row, work = self._state, read.row, Work()
        columns = state.columns
        dead = bool(columns.flags[row] & DEAD)
        columns.busy[row] &= 0xFF ^ BUSY_FILL
        if dead:
            state.ssd.free(ssd_location(read.volume, read.item.place))
            state.settle(row)
        elif found and error is None:
            columns.flags[row] |= READY
            state.dram.policy.added([row])
            state.ledger.count("promoted_chunks_total")
            state.ssd.policy.released_one(row)
        else:
            self._fill_failed(read, error, work)
        return work

    def expire(self) -> None:
        """Give back what leases past their time hold, and show sick chunks again. Called about once a second."""
        state, now_s = self._state, self._state.clock.now()
        for session in state.sessions.values():
            for number in [n for n, lease in session.leases.items() if lease.expires_s <= now_s]:
                state.ledger.count("leases_expired_total")
                self.release(session, number)
        for row in [r for r, (until_s, _) in self._sick.items() if until_s <= now_s]:
            _, key = self._sick.pop(row)
            if state.columns.keys[row] == key:
                state.columns.flags[row] &= 0xFF ^ SICK

    def _find(self, series: Series, keys: bytes, stop: bool) -> list[int]:
        """Row of each key, -1 for an absent one; with `stop` only the leading run of present ones."""
        if len(keys) % KEY_BYTES:
            raise Invalid(f"keys take {KEY_BYTES} bytes each; got {len(keys)} bytes")
        rows: list[int] = list(map(series.rows.get, _unpacker(len(keys)).unpack(keys), repeat(NOWHERE)))
        if stop and NOWHERE in rows:
            del rows[rows.index(NOWHERE) :]
        if rows and (series.orphans or self._sick):
            hidden = self._state.columns.flags
            for i, row in enumerate(rows):
                if row >= 0 and hidden[row] & _HIDDEN:
                    if stop:
                        return rows[:i]
                    rows[i] = NOWHERE
        return rows

    def _grant(
        self, rows: npt.NDArray[np.intp], codes: bytearray, where: list[int], layerwise: bool, leading: bool, work: Work
    ) -> int:
        """Codes for pinned rows, starting fills; returns how many, from the first on, have a slot."""
        state = self._state
        columns = state.columns
        if (columns.flags[rows] & READY).all():
            for i in where:
                codes[i] = Load.DRAM
            return len(where)
        for position, (i, row) in enumerate(zip(where, rows.tolist(), strict=True)):
            if columns.flags[row] & READY:
                codes[i] = Load.DRAM
            elif columns.busy[row] & BUSY_FILL:
                codes[i] = Load.SSD
                state.ledger.count("fills_joined_total")
            elif self._start_fill(row, layerwise, work):
                codes[i] = Load.SSD
            else:
                for late in where[position:]:
                    codes[late] = Load.MISS_AFTER_GAP if leading else Load.MISS_FULL
                codes[i] = Load.MISS_FULL
                return position
        return len(where)

    def _start_fill(self, row: int, layerwise: bool, work: Work) -> bool:
        state = self._state
        columns = state.columns
        offset = state.take_slot(state.series_of(row).slot_bytes)
        if offset is None:
            return False
        columns.dram[row] = offset
        columns.busy[row] |= BUSY_FILL
        generation = state.open_slot(offset, 0)
        volume = volume_of(int(columns.ssd[row]))
        work.reads.append(Read(row, volume, state.item(row), offset, generation, layerwise))
        return True

    def _fill_failed(self, read: Read, error: KVStoreError | None, work: Work) -> None:
        """Corrupt or absent: the SSD copy is gone. Otherwise it is the device's fault: keep it, hidden for a while."""
        state, row = self._state, read.row
        columns = state.columns
        state.close_slot(read.offset)
        columns.dram[row] = NOWHERE
        state.dram.free(read.offset)
        series, key = state.series_of(row), columns.key(row)
        corrupt = isinstance(error, Corrupt)
        if error is None or corrupt:
            why = Gone.CORRUPT if corrupt else Gone.IO_ERROR
            state.ledger.count("quarantined_total" if corrupt else "stale_records_total")
            if corrupt:
                work.deletes.append(Delete(read.volume, read.item))
            state.leave_ssd(row, why, reuse=not corrupt)
        else:
            why = Gone.IO_ERROR
            state.ledger.count("load_errors_total", error.code)
            columns.flags[row] |= SICK
            self._sick[row] = (state.clock.now() + state.limits.sick_s, key)
            state.ssd.policy.released_one(row)
        event = "quarantined" if corrupt else "missed"
        state.ledger.record(Event(state.clock.now(), event, why.name.lower(), "ssd", series.root, key))
