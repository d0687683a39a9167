"""A planner with everything around it played by hand: engines that write, I/O threads that read and write, a clock.

Real: Planner, Slab, Ledger, ManualClock, control page (two numpy arrays). Played: arena bytes and disks
(planner_pictures). Every verb checks its answers against the specification; `planner_checks` checks the whole state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from planner_pictures import ArenaPicture, DiskPicture, Identity, Stamp, stride_of

from kvstore.clock import ManualClock
from kvstore.codes import Ack, Load, Tier
from kvstore.errors import Closed, Corrupt, Full, KVStoreError, Unavailable
from kvstore.index import BUSY_FILL, BUSY_WRITE, ORPHAN, READY, SICK, Series, place_of, ssd_location, volume_of
from kvstore.keys import KEY_BYTES, NO_PARENT
from kvstore.layout import PartRow, PoolSpec
from kvstore.ledger import Ledger
from kvstore.namespace import BaseNamespace, RequestIdentity, root_digest
from kvstore.planner import Delete, Limits, Planner, Read, Work, Write, WriteBudget
from kvstore.planner.records import Session
from kvstore.record import HEADER_BYTES
from kvstore.slab import Slab
from kvstore.units import PAGE_BYTES, KiB

ARENA_UNIT = 32 * KiB
DISK_UNIT = 48 * KiB
FAILED = 0xFFFFFFFF
CHAIN = 12
FORK = 4
"""Chains share their first chunks."""


def pool(name: str, rule: str, *shard_bytes: int) -> PoolSpec:
    parts = tuple(PartRow(shard, 0, size) for shard, size in enumerate(shard_bytes))
    return PoolSpec(parts, name, rule, window_chunks=2 if rule == "trailing" else 0)  # type: ignore[arg-type]


NAMESPACES = (
    BaseNamespace("a", "w", (pool("full", "all", 4096), pool("window", "trailing", 4096))),
    BaseNamespace("b", "w", (pool("full", "all", 4096, 4096),)),
    BaseNamespace("c", "w", (pool("full", "all", 3 * 4096),)),
)
TARGETS = ((0, 0), (0, 1), (1, 0), (2, 0))
"""(namespace, pool): 4 KiB, 4 KiB trailing, two shards of 4 KiB, 12 KiB."""

TRAILING_SERIES = {(root_digest(NAMESPACES[0]), 1)}


def chain_key(chain: int, position: int) -> bytes:
    return bytes([1, chain if position >= FORK else 0, position]) + bytes(29)


def chain_parent(chain: int, position: int) -> bytes:
    return chain_key(chain, position - 1) if position else NO_PARENT


PARENTS = {chain_key(c, p): chain_parent(c, p) for c in range(4) for p in range(64)}


@dataclass
class Writer:
    """A process that may write into these pages until it commits, aborts or dies."""

    owner: int
    pages: range
    identity: Identity
    slot_page: int


@dataclass
class View:
    """What a reader was promised: these pages hold that chunk while the generation stays."""

    session: bytes
    lease: int
    identity: Identity
    page: int
    generation: int
    pages: range
    parts: int
    excused: bool = False
    """Removed, purged or failed to load: the generation may change under the lease."""


@dataclass
class Engine:
    session: Session
    roots: dict[int, int] = field(default_factory=dict)
    owners: list[int] = field(default_factory=list)


class World:
    def __init__(
        self, arena_units: int = 4, disk_units: tuple[int, ...] = (3, 4), limits: Limits | None = None
    ) -> None:
        self.clock, self.ledger, self.limits = ManualClock(), Ledger(), limits or Limits()
        self.arena_units, self.disk_units = arena_units, disk_units
        self.disks = [DiskPicture(DISK_UNIT) for _ in disk_units]
        self.version = 0
        self.next_owner = 1
        self.published: dict[Identity, set[int]] = {}
        self.forbidden: dict[Identity, set[int]] = {}
        self.unconfirmed: list[tuple[list[Delete], Identity, set[int]]] = []
        """Removals whose deletes have not all ended: a crash may bring them back."""
        self.budget = WriteBudget()
        self.boot()

    def boot(self) -> None:
        """A new daemon with a new arena over the same disks."""
        pages = self.arena_units * ARENA_UNIT // PAGE_BYTES
        self.generations: npt.NDArray[np.uint64] = np.ones(pages, np.uint64)
        self.parts_ready: npt.NDArray[np.uint32] = np.zeros(pages, np.uint32)
        self.arena = ArenaPicture(pages)
        self.planner = Planner(
            Slab(self.arena_units * ARENA_UNIT, ARENA_UNIT),
            [Slab(units * DISK_UNIT, DISK_UNIT, HEADER_BYTES) for units in self.disk_units],
            self.generations,
            self.parts_ready,
            self.clock,
            self.ledger,
            self.limits,
            budget=self.budget,
        )
        self.state, self.columns = self.planner.state, self.planner.state.columns
        self.engines: dict[bytes, Engine] = {}
        self.writers: dict[tuple[int, int], Writer] = {}
        self.views: list[View] = []
        self.reads: list[Read] = []
        self.writes: list[Write] = []
        self.deletes: list[Delete] = []
        self.leaked: set[int] = set()
        """SSD locations whose delete failed: never used again by this daemon."""
        self.closed: set[int] = set()
        """Reservations that were ended."""
        for number, disk in enumerate(self.disks):
            self.planner.recovery.restore(number, disk.load())
        self.planner.recovery.relink()

    # ---- names ---------------------------------------------------------------------------------------------------

    def open(self, name: bytes, owners: int = 2) -> Engine:
        session = self.planner.session_opened(name, "")
        engine = self.engines.setdefault(name, Engine(session))
        engine.session = session
        engine.roots = {
            number: self.planner.open_root(session, namespace, RequestIdentity())[0].handle
            for number, namespace in enumerate(NAMESPACES)
        }
        while len(engine.owners) < owners:
            engine.owners.append(self.next_owner)
            self.next_owner += 1
        return engine

    def series(self, name: bytes, target: int) -> Series:
        namespace, number = TARGETS[target]
        return self.planner.series(self.engines[name].session, self.engines[name].roots[namespace], number)

    def identity(self, series: Series, key: bytes) -> Identity:
        return Identity(series.root, series.pool, key)

    def identity_of(self, row: int) -> Identity:
        return self.identity(self.state.series_of(row), self.columns.key(row))

    def _submit(self, work: Work) -> None:
        for read in work.reads:
            self.arena.tear(self._pages(read.offset, read.item.layout.slot_bytes))
        self.reads += work.reads
        self.writes += work.writes
        self.deletes += work.deletes

    def _pages(self, offset: int, size_bytes: int) -> range:
        return range(offset // PAGE_BYTES, (offset + size_bytes) // PAGE_BYTES)

    # ---- stores --------------------------------------------------------------------------------------------------

    def reserve(self, name: bytes, owner: int, target: int, shard: int, keys: list[bytes]) -> int | None:
        series, engine = self.series(name, target), self.engines[name]
        flags = self.columns.flags
        known = {k for k in keys if k in series.rows and not flags[series.rows[k]] & SICK}
        reachable = {NO_PARENT, *series.rows, *series.pending}
        joint = {key for number, key in engine.session.joint if number == series.number}
        dirty = self.state.dirty_bytes > self.limits.dirty_share * self.state.arena_bytes
        made, codes, offsets = self.planner.stores.reserve(
            engine.session, owner, series, shard, b"".join(keys), b"".join(PARENTS[k] for k in keys)
        )
        assert len(codes) == len(offsets) == len(keys)
        full = False
        for i, (key, code) in enumerate(zip(keys, codes, strict=True)):
            assert (code == Ack.EXISTS) == (key in known), "EXISTS is for what is kept, and only for that"
            if code == Ack.GRANTED:
                assert not full, "after a refusal for want of room nothing is granted: longest prefix"
                assert not dirty
                assert series.rule != "all" or PARENTS[key] in reachable
                reachable.add(key)
                assert made is not None
                self._note_writer(made.number, i, owner, series, shard, key, int(offsets[i]))
            elif code == Ack.REFUSED_ORPHAN:
                assert series.rule == "all"
                assert PARENTS[key] not in (reachable & {*series.rows, *series.pending, NO_PARENT})
            elif code == Ack.REFUSED_FULL:
                full = True
            elif code == Ack.REFUSED_BACKPRESSURE:
                assert dirty or key in joint or keys.index(key) != i
            elif code == Ack.PARTIAL:
                assert engine.session.joint[series.number, key].committed >> shard & 1, "this rank's part is kept"
            else:
                assert code == Ack.EXISTS, f"no answer of reserve: {Ack(code)!r}"
        if full and made is not None and {series.rows[key] for key in known} <= set(made.pinned):
            self._check_really_full(engine.session, series.slot_bytes)
        return made.number if made is not None else None

    def _note_writer(
        self, number: int, i: int, owner: int, series: Series, shard: int, key: bytes, offset: int
    ) -> None:
        assert series.layout is not None
        start = offset + series.layout.shard_offsets[shard]
        pages = self._pages(start, series.layout.shard_bytes[shard])
        writer = Writer(owner, pages, self.identity(series, key), offset // PAGE_BYTES)
        for other in self.writers.values():
            same_slot = other.slot_page == writer.slot_page and other.identity == writer.identity
            assert not set(other.pages) & set(pages), f"granted to a second writer: {pages}"
            assert same_slot or not set(other.pages) & set(self._pages(offset, series.slot_bytes))
        self.arena.tear(pages)
        self.writers[number, i] = writer

    def _check_really_full(self, session: Session, slot_bytes: int) -> None:
        room = self.state.room_for(session, slot_bytes)
        assert room == 0 or not self.obtainable(slot_bytes), "refused for want of room, and there is some"

    def obtainable(self, slot_bytes: int, also_held: set[int] | None = None) -> bool:
        """By brute force: whether DRAM has, or may make, room for one slot of this size."""
        columns, slab = self.columns, self.state.dram.slabs[0]

        def held(row: int) -> bool:
            return columns.held(row) or row in (also_held or ())

        rows = [r for r in range(len(columns.keys)) if columns.dram[r] >= 0]
        members = {r for r in rows if columns.flags[r] & READY}
        parents = {int(columns.parent[r]) for r in members}
        own = [r for r in members - parents if self.state.series_of(r).slot_bytes == slot_bytes]
        if slab.free_slots(slot_bytes) and any(s.slot_bytes == slot_bytes and s.free for s in slab.segments()):
            return True
        if any(not held(r) for r in own):
            return True
        open_units = set(slab.free_units())
        for segment in slab.segments():
            mine = [r for r in rows if slab.segment_of(int(columns.dram[r])) is segment]
            movable = len(mine) == segment.used and not any(held(r) for r in mine)
            if segment.slot_bytes != slot_bytes and movable:
                open_units |= set(range(segment.first_unit, segment.first_unit + segment.units))
        need = slab.units_for(slot_bytes)
        return any(set(range(u, u + need)) <= open_units for u in range(slab.units - need + 1))

    def scribble(self) -> None:
        """Every living writer writes now."""
        for writer in self.writers.values():
            self.arena.tear(writer.pages)

    def commit(self, name: bytes, number: int, first: int, count: int, hold: bool, durable: bool = False) -> list[Ack]:
        """The engine's copies of this range are complete; then it commits them."""
        session = self.engines[name].session
        made = session.reservations[number]
        series, keys = made.series, made.keys
        for i in range(first, first + count):
            writer = self.writers.pop((number, i), None)
            if writer is not None:
                self.version += 1
                self.arena.write(
                    writer.pages.start * PAGE_BYTES,
                    [Stamp(writer.identity, page - writer.slot_page, self.version) for page in writer.pages],
                )
        codes, rows, work = self.planner.stores.commit(session, number, first, count, hold, durable)
        assert len(codes) == len(rows) == count
        self._submit(work)
        answers = [Ack(code) for code in codes]
        for i, answer in enumerate(answers):
            key = keys[(first + i) * KEY_BYTES : (first + i + 1) * KEY_BYTES]
            assert answer.stored == (rows[i] >= 0)
            if answer.stored:
                assert series.rows[key] == rows[i], "acknowledged, and not kept"
            if answer in (Ack.STORED_DRAM, Ack.STORED_WRITE_BEHIND) and self.columns.flags[rows[i]] & READY:
                self._publish(rows[i])
        if work.ahead is not None:
            self.planner.stores.prepare(*work.ahead)
        if number not in session.reservations:
            self._forget_writers(number)
        return answers

    def _publish(self, row: int) -> None:
        stamps = self.arena.read(int(self.columns.dram[row]), self.state.series_of(row).slot_bytes)
        known = self.published.setdefault(self.identity_of(row), set())
        known |= {stamp.version for stamp in stamps if stamp is not None}

    def abort(self, name: bytes, number: int) -> None:
        """The engine has stopped writing, then says so."""
        self._forget_writers(number)
        self.planner.stores.end(self.engines[name].session, number)

    def owner_gone(self, owner: int) -> None:
        self.writers = {at: w for at, w in self.writers.items() if w.owner != owner}
        for engine in self.engines.values():
            if owner in engine.owners:
                engine.owners.remove(owner)
                engine.owners.append(self.next_owner)
                self.next_owner += 1
        self.planner.owner_gone(owner)

    def _forget_writers(self, number: int) -> None:
        self.writers = {at: w for at, w in self.writers.items() if at[0] != number}

    def close(self, name: bytes) -> None:
        """The last connection ends; its processes may go on writing."""
        self.planner.session_closed(name)

    # ---- loads ---------------------------------------------------------------------------------------------------

    def visible(self, series: Series, key: bytes) -> bool:
        row = series.rows.get(key)
        return row is not None and not self.columns.flags[row] & (ORPHAN | SICK)

    def lookup(self, name: bytes, target: int, keys: list[bytes]) -> None:
        series = self.series(name, target)
        expected = []
        for key in keys:
            if not self.visible(series, key):
                if series.rule == "all":
                    break
                expected.append(Tier.NONE)
            else:
                ready = self.columns.flags[series.rows[key]] & READY
                expected.append(Tier.DRAM if ready else Tier.SSD)
        assert list(self.planner.loads.lookup(series, b"".join(keys))) == expected

    def lease(self, name: bytes, target: int, keys: list[bytes], ttl_s: float = 30.0) -> int | None:
        series, engine = self.series(name, target), self.engines[name]
        present = [self.visible(series, key) for key in keys]
        if series.rule == "all" and False in present:
            gap = present.index(False)
            present[gap:] = [False] * (len(present) - gap)
        room = self.state.room_for(engine.session, series.slot_bytes)
        busy = {k for k in keys if k in series.rows and self.columns.busy[series.rows[k]] & BUSY_FILL}
        ready = {k for k in keys if k in series.rows and self.columns.flags[series.rows[k]] & READY}
        lease, codes, offsets, generations, work = self.planner.loads.lease(
            engine.session, series, b"".join(keys), False, ttl_s
        )
        self._submit(work)
        started = {read.item.key for read in work.reads}
        granted, full = 0, False
        for i, (key, code) in enumerate(zip(keys, map(Load, codes), strict=True)):
            if not code.hit:
                expected = {Load.MISS_UNKNOWN, Load.MISS_AFTER_GAP}
                if present[i]:
                    expected = {Load.MISS_QUOTA} if granted == room else {Load.MISS_FULL, Load.MISS_QUOTA}
                    expected |= {Load.MISS_AFTER_GAP} if full else set()
                    full = full or code == Load.MISS_FULL
                assert code in expected, f"{code!r} for a key that is {present[i]}"
                continue
            assert present[i], "a hit behind a gap"
            assert not full
            granted += 1
            assert code == (Load.DRAM if key in ready else Load.SSD)
            assert key in ready or key in busy or key in started
            assert lease is not None
            self._note_view(name, lease.number, series, key, int(offsets[i]), int(generations[i]))
        assert granted <= room, "more was pinned than the session may hold"
        if full:
            rows = {series.rows[key] for key in keys if key in series.rows}  # pinned while the answer was made
            room = self.state.room_for(engine.session, series.slot_bytes)
            assert lease is None or not room or not self.obtainable(series.slot_bytes, rows), (
                "a miss for want of room, and there is some"
            )
        return lease.number if lease is not None else None

    def _note_view(self, name: bytes, lease: int, series: Series, key: bytes, offset: int, generation: int) -> None:
        assert series.layout is not None
        page = offset // PAGE_BYTES
        assert generation % 2 == 0
        assert generation == int(self.generations[page])
        pages = self._pages(offset, series.slot_bytes)
        identity = self.identity(series, key)
        self.views.append(View(name, lease, identity, page, generation, pages, series.layout.parts))

    def release(self, name: bytes, lease: int) -> None:
        self.planner.loads.release(self.engines[name].session, lease)

    # ---- I/O threads ---------------------------------------------------------------------------------------------

    def finish_write(self, index: int, error: KVStoreError | None = None) -> None:
        write = self.writes.pop(index)
        slot_bytes = write.item.layout.slot_bytes
        disk = self.disks[write.volume]
        assert write.segment[2] == stride_of(slot_bytes)
        if error is None or not isinstance(error, Full):
            in_use = {int(x) for x in self.columns.ssd[: len(self.columns.keys)]} | {
                ssd_location(read.volume, read.item.place) for read in self.reads
            }
            for place in [*disk.format(*write.segment), write.item.place]:
                assert ssd_location(write.volume, place) not in in_use, "a living record is overwritten"
            disk.records.pop(write.item.place, None)
        if error is None:
            disk.write(write.item, self.arena.read(write.offset, slot_bytes))
        self._submit(self.planner.behind.written([(write, error)]))

    def finish_read(self, index: int, error: KVStoreError | None = None, lost: bool = False) -> None:
        """`lost`: the record vanished from the disk (torn by a crash, say)."""
        read = self.reads.pop(index)
        slot_bytes, disk = read.item.layout.slot_bytes, self.disks[read.volume]
        record = disk.find(read.item)
        purged = read.item.sequence < disk.dead_roots.get(read.item.root, 0)
        assert record is not None or purged, "the record was overwritten while it was read"
        if lost:
            disk.records.pop(read.item.place, None)
            record = None
        found = record is not None and error is None
        self.arena.tear(self._pages(read.offset, slot_bytes))
        if found and record is not None:
            self.arena.write(read.offset, record.stamps)
        else:
            self._excuse(Identity(read.item.root, read.item.pool, read.item.key))
        page = read.offset // PAGE_BYTES
        if int(self.generations[page]) == read.generation:
            self.parts_ready[page] = read.item.layout.parts if found else FAILED
        self._submit(self.planner.loads.filled(read, found, error))

    def finish_delete(self, index: int, fails: bool = False) -> None:
        delete = self.deletes.pop(index)
        location = ssd_location(delete.volume, delete.item.place)
        if fails:
            if delete.item.place:
                self.leaked.add(location)
            return
        for pending, _, _ in self.unconfirmed:
            if delete in pending:
                pending.remove(delete)
        self.unconfirmed = [entry for entry in self.unconfirmed if entry[0]]
        self.disks[delete.volume].delete(delete.item)
        self.planner.removal.deleted(location)

    # ---- operators -----------------------------------------------------------------------------------------------

    def _excuse(self, identity: Identity) -> None:
        for view in self.views:
            if view.identity == identity:
                view.excused = True

    def remove(self, root: bytes, number: int, key: bytes) -> None:
        """As the manager does it: only while the chunk is idle."""
        series = self.state.roots[root].series[number]
        row = series.rows.get(key)
        if row is None or self.columns.busy[row]:
            return
        identity = self.identity(series, key)
        gone = set(self.published.get(identity, ()))
        work = self.planner.removal.remove(series, key)
        self._excuse(identity)
        self.forbidden.setdefault(identity, set()).update(gone)
        if work.deletes:
            self.unconfirmed.append((list(work.deletes), identity, gone))
        self._submit(work)

    def purge(self, root: bytes) -> None:
        known = [i for i in {*self.published, *self._all_identities(root)} if i.root == root]
        _, sequence = self.planner.removal.purge(self.state.roots[root])
        for identity in known:
            self._excuse(identity)
        for identity in [*known, *self._all_identities(root)]:
            self.forbidden.setdefault(identity, set()).update(range(self.version + 1))
        for disk in self.disks:
            disk.dead_roots[root] = max(sequence, disk.dead_roots.get(root, 0))

    def _all_identities(self, root: bytes) -> list[Identity]:
        pools = self.state.roots[root].series
        return [Identity(root, number, key) for number in pools for key in PARENTS]

    def expire(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.planner.expire()

    def crash(self, landed: int) -> None:
        """SIGKILL and a new start. Of the I/O under way, what bit `i` of `landed` names has reached the disk."""
        for i, write in enumerate(self.writes):
            disk = self.disks[write.volume]
            disk.format(*write.segment)
            disk.records.pop(write.item.place, None)
            if landed >> i & 1:
                disk.write(write.item, self.arena.read(write.offset, write.item.layout.slot_bytes))
        for i, delete in enumerate(self.deletes):
            if landed >> (i + 5) & 1:
                self.disks[delete.volume].delete(delete.item)
        for _, identity, versions in self.unconfirmed:
            self.forbidden[identity] -= versions
        self.unconfirmed = []
        self.boot()

    def newest_on_disk(self) -> dict[Identity, tuple[int, int, int]]:
        """(sequence, volume, place) of the record of each identity that a restart must find."""
        newest: dict[Identity, tuple[int, int, int]] = {}
        for number, disk in enumerate(self.disks):
            for place, record in disk.records.items():
                if not disk.dead(record):
                    entry = (record.sequence, number, place)
                    newest[record.identity] = max(entry, newest.get(record.identity, entry))
        return newest

    def place(self, row: int) -> tuple[int, int]:
        location = int(self.columns.ssd[row])
        return volume_of(location), place_of(location)

    def writing(self, row: int) -> bool:
        return bool(self.columns.busy[row] & BUSY_WRITE)


CORRUPT, UNAVAILABLE, FULL = Corrupt("flipped"), Unavailable("no answer"), Full("no space")
__all__ = ["CORRUPT", "FULL", "UNAVAILABLE", "Closed", "World"]
