"""Reserve, commit, abort: the writing half. An acknowledgement is only given for what is kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.codes import Ack
from kvstore.errors import Closed, Invalid, Throttled
from kvstore.index import BUSY_WRITE, READY, SICK, Series
from kvstore.keys import KEY_BYTES, NO_PARENT
from kvstore.ledger import Event
from kvstore.planner.jobs import Work
from kvstore.planner.records import Pending, Reservation, Session
from kvstore.planner.state import State
from kvstore.planner.write_behind import WriteBehind

REFUSALS_NOTED = 8
"""Keys of one request and reason that get an event of their own; the counters have all."""
_LABELS = {int(code): code.name.lower() for code in Ack}


class Stores:
    def __init__(self, state: State, behind: WriteBehind) -> None:
        self._state, self._behind = state, behind

    # ---- reserve -----------------------------------------------------------------------------------------------

    def reserve(
        self,
        session: Session,
        owner: int,
        series: Series,
        shard: int,
        keys: bytes,
        parents: bytes,
        durable: bool = False,
    ) -> tuple[Reservation | None, bytes, npt.NDArray[np.int64]]:
        """Writable slots for the longest prefix of new keys that fits, in one step; the rest is refused at once.

        Returns (reservation or None, Ack code a key, arena offset a key). There is none where nothing was granted,
        but for `durable`, whose commit may have to write what exists in DRAM only.
        """
        state, count = self._state, len(keys) // KEY_BYTES
        self._check(session, series, shard, keys, parents)
        codes = bytearray(count)
        offsets = np.zeros(count, np.int64)
        root = state.roots[series.root]
        made = Reservation(
            state.number(), owner, series, root.epoch_sequence, shard, keys, codes, [None] * count
        )  # fmt: skip
        budget = [state.room_for(session, series.slot_bytes)]
        self._answer_known(session, made, budget)
        refusal = self._refusal()
        for i in range(count):
            if codes[i]:
                continue
            key, parent = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], parents[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            if refusal is not None:
                codes[i] = refusal
            elif not self._reachable(session, made, parent):
                codes[i] = Ack.REFUSED_ORPHAN
            else:
                answer = self._grant(session, made, i, key, parent, budget)
                codes[i] = answer
                if answer == Ack.REFUSED_FULL:
                    refusal = answer
                elif answer == Ack.GRANTED:
                    offsets[i] = made.chunks[i].offset  # type: ignore[union-attr]
        self._count(series, keys, codes)
        if not made.open and not (durable and Ack.EXISTS in codes):
            self._unpin(session, made)
            return None, bytes(codes), offsets
        session.reservations[made.number] = made
        return made, bytes(codes), offsets

    def _check(self, session: Session, series: Series, shard: int, keys: bytes, parents: bytes) -> None:
        if len(keys) % KEY_BYTES or len(parents) != len(keys):
            raise Invalid(
                f"keys and parents take {KEY_BYTES} bytes each and come in pairs: {len(keys)}, {len(parents)}"
            )
        assert series.layout is not None
        if not 0 <= shard < series.layout.shards:
            raise Invalid(f"shard {shard} is not in the part table, which has {series.layout.shards}")
        if len(session.reservations) >= self._state.limits.leases:
            raise Throttled(
                f"this session holds {len(session.reservations)} reservations, the limit: commit or abort some"
            )

    def _answer_known(self, session: Session, made: Reservation, budget: list[int]) -> None:
        """EXISTS for what is kept already; pinned until the reservation ends, so that this batch cannot evict it."""
        state, columns, keys = self._state, self._state.columns, made.keys
        get, rows = made.series.rows.get, []
        for i in range(len(made.codes)):
            row = get(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])
            if row is not None and not columns.flags[row] & SICK:
                made.codes[i] = Ack.EXISTS
                rows.append(row)
        if rows:
            columns.tick[rows[-1]] = state.tick()
            made.pinned = rows[: budget[0]]
            self._pin(session, made, made.pinned)
            whole = len(made.pinned) == len(rows)  # else a grant might evict one that is not pinned
            budget[0] = state.room_for(session, made.series.slot_bytes) if whole else 0

    def _refusal(self) -> Ack | None:
        state = self._state
        if state.ssd.slabs and state.dirty_bytes > state.limits.dirty_share * state.arena_bytes:
            return Ack.REFUSED_BACKPRESSURE
        return None

    def _reachable(self, session: Session, made: Reservation, parent: bytes) -> bool:
        """Whether the chunk would hang on something. A parent that is in DRAM only is pinned while the batch lasts.

        In a chain longer than the arena it is the only leaf, and the batch would evict what it hangs on. One with an
        SSD copy (done or under way) may leave DRAM: the chain stays whole.
        """
        series = made.series
        if series.rule != "all" or parent == NO_PARENT or parent in series.pending:
            return True
        row = series.rows.get(parent)
        if row is None:
            return False
        columns = self._state.columns
        columns.tick[row] = self._state.tick()
        if columns.ssd[row] < 0 and not columns.busy[row] and row not in made.pinned:
            made.pinned.append(row)
            self._pin(session, made, [row])
        return True

    def _grant(self, session: Session, made: Reservation, i: int, key: bytes, parent: bytes, budget: list[int]) -> Ack:
        series, shard, state = made.series, made.shard, self._state
        assert series.layout is not None
        joint = (series.number, key)
        chunk = session.joint.get(joint) if series.layout.shards > 1 else None
        if chunk is not None and chunk.committed >> shard & 1:
            return Ack.PARTIAL  # this rank's part is kept; the others' are awaited
        if chunk is not None and chunk.taken >> shard & 1:
            return Ack.REFUSED_BACKPRESSURE
        if chunk is None:
            offset = state.take_slot(series.slot_bytes) if budget[0] > 0 else None
            if offset is None:
                return Ack.REFUSED_FULL
            budget[0] -= 1
            chunk = Pending(series, key, parent, offset, state.clock.now())
            if series.layout.shards > 1:
                session.joint[joint] = chunk
            series.pending[key] = series.pending.get(key, 0) + 1
            state.reserved_bytes += series.slot_bytes
            session.held_bytes += series.slot_bytes
        chunk.taken |= 1 << shard
        chunk.writers += 1
        made.chunks[i] = chunk
        made.open += 1
        return Ack.GRANTED

    # ---- commit ------------------------------------------------------------------------------------------------

    def commit(
        self, session: Session, number: int, first: int, count: int, hold: bool, durable: bool = False
    ) -> tuple[bytearray, list[int], Work]:
        """Publish a range of a reservation. Returns (Ack code a key, row of each stored key else -1, writes to run).

        With `hold` the chunks stay pinned until `end`: a client that splits a batch acknowledges it as a whole. With
        `durable` those that exist in DRAM only are written now, too.
        """
        state = self._state
        made = session.reservations.get(number)
        if made is None:
            raise Closed(f"reservation {number} is gone: it was ended, or its chunks were given back")
        if first < 0 or count < 0 or first + count > len(made.codes):
            raise Invalid(f"keys {first} to {first + count} are not in reservation {number} of {len(made.codes)} keys")
        series, work, before = made.series, Work(), state.tick()
        current = state.roots[series.root].epoch_sequence == made.epoch
        fresh: list[int] = []
        decided: list[int] = []
        for i in range(first, first + count):
            chunk = made.chunks[i]
            if chunk is not None:
                made.chunks[i] = None
                made.open -= 1
                made.codes[i] = self._commit_one(session, made, chunk, current, fresh)
                decided.append(i)
        if fresh:
            work.ahead = (series, len(fresh), before)
            state.dram.policy.added(fresh)
            if hold:
                made.lasting = True
                made.pinned.extend(fresh)
                self._pin(session, made, fresh)
            self._behind.plan(fresh, work)
        codes = made.codes[first : first + count]
        rows = [-1] * count
        for i, code in enumerate(codes):
            if Ack.STORED_DRAM <= code <= Ack.EXISTS:
                at = (first + i) * KEY_BYTES
                row = series.rows.get(made.keys[at : at + KEY_BYTES], -1)
                rows[i] = row
                if row < 0:  # removed, purged or found damaged since it was answered
                    codes[i] = made.codes[first + i] = Ack.REFUSED_CLOSED
                elif code == Ack.STORED_DRAM and state.columns.busy[row] & BUSY_WRITE:
                    codes[i] = made.codes[first + i] = Ack.STORED_WRITE_BEHIND
        decided_keys = b"".join(made.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in decided)
        self._count(series, decided_keys, bytes(made.codes[i] for i in decided))
        if durable:
            self._write_existing(codes, rows, work)
        more = durable and first + count < len(made.codes)  # keys that exist may be asked for by themselves
        if not made.open and not made.lasting and not more:
            self.end(session, number)
        return codes, rows, work

    def _write_existing(self, codes: bytearray, rows: list[int], work: Work) -> None:
        """What the answer names is pinned meanwhile: the places for some must not come from others."""
        ssd = self._state.columns.ssd
        late = [row for row, code in zip(rows, codes, strict=True) if code == Ack.EXISTS and row >= 0 and ssd[row] < 0]
        if late:
            named = np.array([row for row in rows if row >= 0], np.intp)
            self._state.pin(named)
            self._behind.plan(late, work)
            self._state.unpin(named)

    def _commit_one(self, session: Session, made: Reservation, chunk: Pending, current: bool, fresh: list[int]) -> Ack:
        series, state = made.series, self._state
        assert series.layout is not None
        chunk.writers -= 1
        chunk.committed |= 1 << made.shard
        if not current or chunk.over:
            self.give_up(session, chunk)
            return Ack.REFUSED_CLOSED
        if chunk.committed != (1 << series.layout.shards) - 1:
            return Ack.PARTIAL
        existing = series.rows.get(chunk.key)
        if existing is not None and not state.columns.flags[existing] & SICK:
            state.ledger.count("duplicate_stores_total")
            self.give_up(session, chunk)
            return Ack.EXISTS
        self._part_ways(session, chunk)
        if existing is None:
            existing = state.add_row(series, chunk.key, chunk.parent)
        state.columns.flags[existing] = state.columns.flags[existing] & (0xFF ^ SICK) | READY
        state.columns.dram[existing] = chunk.offset
        state.open_slot(chunk.offset, series.layout.parts)
        fresh.append(existing)
        return Ack.STORED_DRAM

    # ---- give back ---------------------------------------------------------------------------------------------

    def end(self, session: Session, number: int) -> None:
        """Abort what is not committed (its writer has stopped) and unpin the rest. Unknown numbers are ignored."""
        made = session.reservations.pop(number, None)
        if made is None:
            return
        for chunk in made.chunks:
            if chunk is not None:
                chunk.writers -= 1
                self._state.ledger.count("reservations_aborted_total")
                self.give_up(session, chunk)
        self._unpin(session, made)

    def owner_gone(self, owner: int) -> int:
        """The process can write no more: end its reservations. Returns how many."""
        ended = 0
        for session in self._state.sessions.values():
            for number in [n for n, made in session.reservations.items() if made.owner == owner]:
                self.end(session, number)
                ended += 1
        return ended

    def expire(self, session: Session, older_than_s: float) -> None:
        """Give up chunks whose other ranks never came: nobody writes into them, and they stay incomplete."""
        for chunk in list(session.joint.values()):
            if not chunk.writers and chunk.since_s <= older_than_s:
                self._state.ledger.count("incomplete_chunks_total")
                self.give_up(session, chunk)

    def give_up(self, session: Session, chunk: Pending) -> None:
        """The chunk will not be published; its slot goes back when nobody can write into it any more."""
        chunk.over = True
        self._leave_joint(session, chunk)
        if not chunk.writers:
            self._part_ways(session, chunk)
            self._state.dram.free(chunk.offset)

    def _leave_joint(self, session: Session, chunk: Pending) -> None:
        """No other rank joins it any more; the next one starts anew."""
        name = (chunk.series.number, chunk.key)
        if session.joint.get(name) is chunk:
            del session.joint[name]

    def _part_ways(self, session: Session, chunk: Pending) -> None:
        """Nothing is pending any more: the slot belongs to a row now, or is about to be free."""
        series = chunk.series
        self._leave_joint(session, chunk)
        left = series.pending[chunk.key] - 1
        if left:
            series.pending[chunk.key] = left
        else:
            del series.pending[chunk.key]
        self._state.reserved_bytes -= series.slot_bytes
        session.held_bytes -= series.slot_bytes

    def _pin(self, session: Session, made: Reservation, rows: list[int]) -> None:
        if rows:
            made.held_bytes += len(rows) * made.series.slot_bytes
            session.held_bytes += len(rows) * made.series.slot_bytes
            self._state.pin(np.array(rows, np.intp))

    def _unpin(self, session: Session, made: Reservation) -> None:
        session.held_bytes -= made.held_bytes
        if made.pinned:
            self._state.unpin(np.array(made.pinned, np.intp))

    def prepare(self, series: Series, count: int, before: int) -> None:
        """After a commit, while the engine copies nothing into us: victims for a next batch of the same size."""
        state = self._state
        most = int(state.limits.ahead_share * state.arena_bytes) // series.slot_bytes
        state.dram.prepare(series.slot_bytes, min(count, most), before)

    def _count(self, series: Series, keys: bytes, codes: bytes | bytearray) -> None:
        """Every answer in the counters, the first refused keys of a request in the ledger, with the reason."""
        state = self._state
        for code in set(codes):
            if code == Ack.GRANTED:
                continue
            state.ledger.count("acks_total", _LABELS[code], codes.count(code))
            if code < Ack.REFUSED_FULL:
                continue
            at = -1
            for _ in range(REFUSALS_NOTED):
                at = codes.find(code, at + 1)
                if at < 0:
                    break
                key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
                state.ledger.record(Event(state.clock.now(), "refused", _LABELS[code], "dram", series.root, key))
