"""The whole state against what the specification says must be true after every step. White box: it reads everything."""

from __future__ import annotations

from collections import Counter

import numpy as np
from planner_pictures import Identity
from planner_world import PARENTS, TRAILING_SERIES, World

from kvstore.index import BUSY_FILL, BUSY_WRITE, DEAD, NOWHERE, ORPHAN, READY, SICK, ssd_location
from kvstore.keys import NO_PARENT
from kvstore.planner.records import Pending
from kvstore.slab import Slab
from kvstore.units import PAGE_BYTES

GONE_FOR = {"evicted", "removed", "quarantined", "missed"}


def check(world: World) -> None:
    check_rows(world)
    check_links(world)
    check_holders(world)
    check_slots(world)
    check_bytes(world)
    check_promises(world)


def rows_in_use(world: World) -> list[int]:
    return [row for row, key in enumerate(world.columns.keys) if key is not None]


def living(world: World) -> dict[Identity, int]:
    return {world.identity(s, key): row for s in world.state.series for key, row in s.rows.items()}


def check_rows(world: World) -> None:
    """A key is in its series exactly while its row is in a tier or being filled; dead rows are held by somebody."""
    columns = world.columns
    alive = living(world)
    assert len(set(alive.values())) == len(alive), "two keys share a row"
    for identity, row in alive.items():
        assert world.identity_of(row) == identity
        flags, busy = int(columns.flags[row]), int(columns.busy[row])
        assert not flags & DEAD
        filling = bool(busy & BUSY_FILL)
        assert flags & READY or columns.ssd[row] >= 0, "in neither tier"
        assert (columns.dram[row] >= 0) == bool(flags & READY or filling)
        assert not (filling and (flags & READY or columns.ssd[row] < 0))
        assert not (busy & BUSY_WRITE and (not flags & READY or columns.ssd[row] >= 0))
        assert not (flags & SICK and flags & READY)
    for row in set(rows_in_use(world)) - set(alive.values()):
        assert columns.flags[row] & DEAD, "a row that nobody can find"
        assert columns.pins[row] or columns.busy[row], "a dead row that nobody holds"
        assert columns.ssd[row] < 0
        assert bool(columns.dram[row] >= 0) == bool(columns.busy[row])


def check_links(world: World) -> None:
    """Parents, orphans and what waits for whom; the policies' idea of children."""
    columns, state = world.columns, world.state
    for series in state.series:
        waiting: dict[bytes, set[int]] = {}
        for key, row in series.rows.items():
            parent = PARENTS[key]
            there = series.rows.get(parent, NOWHERE)
            if (series.root, series.pool) not in TRAILING_SERIES:
                assert columns.parent[row] == there
                missing = parent != NO_PARENT and there == NOWHERE
                assert bool(columns.flags[row] & ORPHAN) == missing, "hidden exactly while the parent is not here"
                if missing:
                    waiting.setdefault(parent, set()).add(row)
            else:
                assert columns.parent[row] in (there, NOWHERE)
                assert not columns.flags[row] & ORPHAN or series.layout is None
        if (series.root, series.pool) in TRAILING_SERIES:
            continue
        assert series.waiting == waiting
        assert series.orphans == {row: parent for parent, rows in waiting.items() for row in rows}
    alive = set(living(world).values())
    for tier, column in ((state.dram, columns.dram), (state.ssd, columns.ssd)):
        members = {r for r in alive if column[r] >= 0 and not (tier is state.dram and columns.busy[r] & BUSY_FILL)}
        parents = {int(columns.parent[r]) for r in members}
        for row in range(len(columns.keys)):
            assert tier.policy.has_children(row) == (row in parents), f"children of row {row}"


def pendings(world: World) -> list[Pending]:
    found: dict[int, Pending] = {}
    for session in world.state.sessions.values():
        chunks = [c for made in session.reservations.values() for c in made.chunks] + list(session.joint.values())
        found |= {id(chunk): chunk for chunk in chunks if chunk is not None}
    return list(found.values())


def check_holders(world: World) -> None:
    """Pins and byte counts, recounted from who holds what; nobody above their share."""
    columns, state = world.columns, world.state
    pins: Counter[int] = Counter()
    for session in state.sessions.values():
        held = 0
        for lease in session.leases.values():
            pins.update(lease.rows.tolist())
            held += sum(state.series_of(r).slot_bytes for r in lease.rows.tolist())
        mine: dict[int, Pending] = {id(c): c for c in session.joint.values()}
        for made in session.reservations.values():
            pins.update(made.pinned)
            held += len(made.pinned) * made.series.slot_bytes
            mine |= {id(c): c for c in made.chunks if c is not None}
        held += sum(c.series.slot_bytes for c in mine.values())
        assert session.held_bytes == held
        assert held <= world.limits.session_share * state.arena_bytes, "one session holds more than its share"
    for row in range(len(columns.keys)):
        assert columns.pins[row] == pins[row], f"pins of row {row}"
    assert state.pinned_bytes == sum(state.series_of(r).slot_bytes for r in pins)
    waiting = pendings(world)
    assert state.reserved_bytes == sum(c.series.slot_bytes for c in waiting)
    assert state.pinned_bytes + state.reserved_bytes <= world.limits.all_share * state.arena_bytes
    for series in state.series:
        assert series.pending == Counter(c.key for c in waiting if c.series is series)
    assert state.dirty_bytes == sum(w.item.layout.slot_bytes for w in world.writes)
    busy = Counter({w.row: BUSY_WRITE for w in world.writes}) + Counter({r.row: BUSY_FILL for r in world.reads})
    assert [int(b) for b in columns.busy[: len(columns.keys)]] == [busy[r] for r in range(len(columns.keys))]


def slots_used(slab: Slab) -> set[int]:
    return {
        s.base + n * s.slot_bytes for s in slab.segments() for n in range(s.fresh) if n not in set(s.freed)
    }  # fmt: skip


def check_slots(world: World) -> None:
    """Used slots of every slab are exactly those that a row, a reservation or an I/O names, each once."""
    columns, state = world.columns, world.state
    rows = rows_in_use(world)
    named = [int(columns.dram[r]) for r in rows if columns.dram[r] >= 0] + [c.offset for c in pendings(world)]
    assert len(named) == len(set(named)), "one arena slot has two uses"
    assert slots_used(state.dram.slabs[0]) == set(named)
    places = [int(columns.ssd[r]) for r in rows if columns.ssd[r] >= 0]
    places += [ssd_location(w.volume, w.item.place) for w in world.writes]
    places += [ssd_location(d.volume, d.item.place) for d in world.deletes if d.item.place]
    places += [ssd_location(r.volume, r.item.place) for r in world.reads if columns.flags[r.row] & DEAD]
    places += list(world.leaked)
    assert len(places) == len(set(places)), "one SSD slot has two uses"
    used = {ssd_location(v, p) for v, slab in enumerate(state.ssd.slabs) for p in slots_used(slab)}
    assert used == set(places)
    for slab in [*state.dram.slabs, *state.ssd.slabs]:
        assert slab.used_bytes == sum(s.used * s.slot_bytes for s in slab.segments())
        taken = {u for s in slab.segments() for u in range(s.first_unit, s.first_unit + s.units)}
        assert sorted(taken | set(slab.free_units())) == list(range(slab.units))
    readable = {int(columns.dram[r]) // PAGE_BYTES for r in living(world).values() if columns.dram[r] >= 0}
    even = set(np.nonzero(world.generations % 2 == 0)[0].tolist())
    assert even == readable, "odd while free or writable, even while readable"


def check_bytes(world: World) -> None:
    """Every tier holds the bytes of the chunk it is said to hold, stored and not removed since."""
    columns = world.columns
    for identity, row in living(world).items():
        size = world.state.series_of(row).slot_bytes
        if columns.flags[row] & READY:
            assert_whole(world, identity, world.arena.read(int(columns.dram[row]), size))
        if columns.ssd[row] >= 0:
            volume, place = world.place(row)
            record = world.disks[volume].records.get(place)
            assert record is not None, "no record where one should be"
            assert (record.identity, record.sequence) == (identity, int(columns.sequence[row]))
            assert not world.disks[volume].dead(record), "a removed record is known again"
            assert_whole(world, identity, record.stamps)
    for write in world.writes:
        stamps = world.arena.read(write.offset, write.item.layout.slot_bytes)
        assert {s.identity.key for s in stamps if s is not None} == {write.item.key}, "overwritten while being written"
        assert None not in stamps


def assert_whole(world: World, identity: Identity, stamps: list) -> None:  # type: ignore[type-arg]
    assert None not in stamps, "torn bytes are served"
    assert [(s.identity, s.page) for s in stamps] == [(identity, n) for n in range(len(stamps))], "wrong bytes"
    versions = {s.version for s in stamps}
    assert versions <= world.published.get(identity, set()), "bytes that no commit has published"
    assert not versions & world.forbidden.get(identity, set()), "what was removed is served again"


def check_promises(world: World) -> None:
    """Each reader's grant, for as long as the generation stays; and pinned chunks stay unless somebody removes them."""
    kept = []
    for view in world.views:
        engine = world.state.sessions.get(view.session)
        if int(world.generations[view.page]) != view.generation:
            holds = engine is not None and view.lease in engine.leases
            assert view.excused or not holds, "a pinned chunk lost its slot"
            continue
        kept.append(view)
        if int(world.parts_ready[view.page]) == view.parts:
            stamps = [world.arena.pages[page] for page in view.pages]
            assert [s and (s.identity, s.page) for s in stamps] == [(view.identity, n) for n in range(len(stamps))], (
                "a reader sees wrong bytes under an unchanged generation"
            )
    world.views = kept


def check_losses(world: World, before: set[Identity], since_s: float) -> None:
    """Whatever left the system since then left a reason in the ledger."""
    told = {(e.root, e.key) for e in world.ledger.events() if e.at_s >= since_s and e.what in GONE_FOR}
    for identity in before - set(living(world)):
        assert (identity.root, identity.key) in told, f"gone without a word: {identity.key[:3].hex()}"


def check_recovered(world: World) -> None:
    """After a start: every record on disk that nobody removed, the newest of each chunk."""
    newest = world.newest_on_disk()
    found = living(world)
    assert set(found) == set(newest)
    for identity, row in found.items():
        sequence, volume, place = newest[identity]
        assert world.place(row) == (volume, place), "an older copy won"
        assert int(world.columns.sequence[row]) == sequence
        assert sequence < world.state.next_sequence
