"""Bugs that were, each told: what went wrong, and what must be true now. And scenes that the specification names."""

from __future__ import annotations

import pytest
from planner_checks import check, check_recovered, living
from planner_world import CORRUPT, World, chain_key

from kvstore.codes import Ack, Tier
from kvstore.errors import Closed, Invalid
from kvstore.keys import NO_PARENT
from kvstore.layout import one_part_pool
from kvstore.namespace import BaseNamespace, RequestIdentity

A, TRAILING, TWO_SHARDS, BIG = range(4)


def chain(count: int, first: int = 0, chain_: int = 0) -> list[bytes]:
    return [chain_key(chain_, position) for position in range(first, first + count)]


def store(world: World, name: bytes, where: int, keys: list[bytes], shard: int = 0) -> list[Ack]:
    number = world.reserve(name, world.engines[name].owners[0], where, shard, keys)
    return [] if number is None else world.commit(name, number, 0, len(keys), hold=False)


def finish(world: World) -> None:
    while world.writes:
        world.finish_write(0)
    while world.reads:
        world.finish_read(0)
    while world.deletes:
        world.finish_delete(0)


@pytest.fixture
def world() -> World:
    world = World()
    world.open(b"one")
    return world


def test_a_row_number_that_served_another_slot_size_can_be_evicted_again() -> None:
    """A row was a chunk of 4 KiB with an entry in that size's heap; taken over, its number became a parent of 12 KiB.
    Added with a child, it kept the mark "queued" of its former life, so that after its child had gone nobody could
    name it: lost room for ever."""
    world = World(arena_units=2, disk_units=())
    world.open(b"one")
    store(world, b"one", A, chain(1))
    store(world, b"one", BIG, chain(2))
    policy = world.state.dram.policy
    for _ in range(2):
        row = policy.victim(3 * 4096)
        assert row is not None
        world.state.leave_dram(row, 1)  # type: ignore[arg-type]
    assert world.state.dram.used_bytes == 0


def test_a_dead_row_held_by_a_lease_is_nobodys_child(world: World) -> None:
    """A chunk was removed under a lease, and its row stayed with the number of its parent. The parent left, its number
    became another chunk, which had children of its own: when that one was removed, the dead row was made its orphan,
    and its number haunted the orphans of a series it never belonged to."""
    store(world, b"one", A, chain(2))
    finish(world)
    world.lease(b"one", A, chain(2))
    series = world.series(b"one", A)
    dead = series.rows[chain_key(0, 1)]
    for key in reversed(chain(2)):
        world.remove(series.root, series.pool, key)
    for lease in list(world.engines[b"one"].session.leases):
        world.release(b"one", lease)
    finish(world)
    check(world)
    assert world.columns.keys[dead] is None
    store(world, b"one", A, chain(3))
    finish(world)
    world.lease(b"one", A, chain(3))
    rows = [series.rows[key] for key in chain(3)]
    world.remove(series.root, series.pool, chain_key(0, 2))
    assert world.columns.parent[rows[2]] == -1
    check(world)


def test_known_chunks_that_a_reservation_pins_count_for_its_session() -> None:
    """Chunks answered EXISTS are pinned until the reservation ends, and were charged to nobody: with a few small
    reservations one session could pin 80 % of the arena instead of its half, and lock the others out."""
    world = World(arena_units=4, disk_units=())
    world.open(b"one")
    store(world, b"one", A, chain(12))
    session = world.engines[b"one"].session
    for extra in range(3):
        world.reserve(b"one", world.engines[b"one"].owners[0], A, 0, [*chain(12), chain_key(1, 4 + extra)])
        check(world)
    assert session.held_bytes <= world.state.arena_bytes / 2


def test_a_purge_takes_the_shards_committed_before_it_along(world: World) -> None:
    """Rank 0 had committed its shard, the root was purged (new weights, say), then rank 1 stored: the chunk came up
    whole, half of it from before the purge."""
    store(world, b"one", TWO_SHARDS, chain(1), shard=0)
    root = world.series(b"one", TWO_SHARDS).root
    world.purge(root)
    assert store(world, b"one", TWO_SHARDS, chain(1), shard=1) == [Ack.PARTIAL]
    assert store(world, b"one", TWO_SHARDS, chain(1), shard=0)[0].stored
    check(world)


def test_a_chunk_given_up_by_one_rank_can_be_started_anew(world: World) -> None:
    """Rank 0 aborted while rank 1 was still writing; whoever stored that key then was granted a share of the given-up
    slot, copied into it, and was refused at commit: copies for nothing until the last writer let go."""
    owners = world.engines[b"one"].owners
    first = world.reserve(b"one", owners[0], TWO_SHARDS, 0, chain(1))
    second = world.reserve(b"one", owners[1], TWO_SHARDS, 1, chain(1))
    assert first is not None
    assert second is not None
    world.abort(b"one", first)
    again = world.reserve(b"one", owners[0], TWO_SHARDS, 0, chain(1))
    assert again is not None
    assert world.commit(b"one", second, 0, 1, hold=False) == [Ack.REFUSED_CLOSED]
    assert world.commit(b"one", again, 0, 1, hold=False) == [Ack.PARTIAL]
    assert store(world, b"one", TWO_SHARDS, chain(1), shard=1)[0].stored
    check(world)


def test_exists_is_not_repeated_for_a_chunk_that_was_purged_meanwhile(world: World) -> None:
    """EXISTS was found out at reserve and given again at commit, though a purge had dropped the chunk between the two:
    an acknowledgement for nothing."""
    store(world, b"one", A, chain(1))
    number = world.reserve(b"one", world.engines[b"one"].owners[0], A, 0, chain(2))
    assert number is not None
    world.purge(world.series(b"one", A).root)
    assert world.commit(b"one", number, 0, 2, hold=False) == [Ack.REFUSED_CLOSED] * 2


def test_each_store_is_counted_once(world: World) -> None:
    """A key answered EXISTS at reserve was counted there and again at commit: `acks_total` said twice the truth."""
    store(world, b"one", A, chain(1))
    store(world, b"one", A, chain(3))
    ledger = world.ledger
    assert ledger.value("acks_total", "exists") == 1
    assert ledger.value("acks_total", "stored_write_behind") == 3


def test_a_removed_chunk_does_not_return_from_an_old_copy() -> None:
    """A chunk was evicted from its SSD volume, its record left in the free place as evictions do; it lived on in DRAM.
    `rm` saw no SSD copy and deleted nothing there: the next start found the old record and served it again."""
    world = World(disk_units=(3, 4))
    world.open(b"one")
    store(world, b"one", A, chain(1))
    finish(world)
    series = world.series(b"one", A)
    world.state.leave_ssd(series.rows[chain_key(0, 0)], 1)  # type: ignore[arg-type]
    world.remove(series.root, series.pool, chain_key(0, 0))
    finish(world)
    world.crash(0)
    assert not living(world)


def test_a_chunk_of_a_root_that_nobody_has_opened_yet_can_be_removed(world: World) -> None:
    """After a restart an operator's `rm` of a chunk whose engine had not come back yet hit an assertion: the layout is
    known only once the root is opened, and deleting does not need it."""
    store(world, b"one", A, chain(2))
    finish(world)
    world.crash(0)
    (identity, _), *_ = sorted(living(world).items(), key=lambda entry: entry[1], reverse=True)
    world.remove(*identity)
    finish(world)
    check(world)
    world.crash(0)
    assert identity not in living(world)
    assert len(living(world)) == 1
    check_recovered(world)


def test_at_the_free_space_floor_a_volume_uses_the_segments_that_it_has() -> None:
    """At its floor a volume may not grow. Segments that had become empty counted as growth: a purge at the floor left a
    volume that never took a write again; and a new slot size evicted a whole segment and still got nothing."""
    world = World(arena_units=8, disk_units=(4,))
    world.open(b"one")
    for number in range(2):
        store(world, b"one", A, chain(12, 0, number))
        finish(world)
    space = world.state.ssd
    assert not space.slabs[0].free_units()
    space.slabs[0].may_take = 0
    store(world, b"one", BIG, chain(1))
    assert len(world.writes) == 1, "a new model gets a segment that an old one gives up"
    finish(world)
    world.purge(world.series(b"one", A).root)
    store(world, b"one", TRAILING, chain(1))
    assert len(world.writes) == 1, "emptied segments are used again"
    finish(world)
    check(world)


def test_a_volume_below_its_floor_takes_no_unit_that_was_never_used() -> None:
    world = World(arena_units=8, disk_units=(4,))
    world.open(b"one")
    world.state.ssd.slabs[0].may_take = 0
    assert store(world, b"one", A, chain(1)) == [Ack.STORED_DRAM]
    assert world.ledger.value("ssd_writes_dropped_total", "ssd_full") == 1


def test_a_read_only_volume_keeps_what_it_has() -> None:
    """A volume turned read-only; each store then evicted one of its chunks, still readable, to make room where nothing
    can be written, and found no place anyway."""
    world = World(arena_units=4, disk_units=(2, 2))
    world.open(b"one")
    for number in range(3):
        store(world, b"one", A, chain(12, 0, number))
        finish(world)
    on_first = [row for row in living(world).values() if world.place(row)[0] == 0]
    assert len(on_first) > 5
    world.state.ssd.usable[0] = False
    for number in range(3):
        store(world, b"one", TRAILING, chain(12, 0, number))
        finish(world)
    assert {world.identity_of(row).pool for row in living(world).values() if world.place(row)[0] == 1} == {0, 1}
    assert [row for row in living(world).values() if world.place(row)[0] == 0] == on_first
    check(world)


def test_in_a_pool_of_windows_a_chunk_without_its_parent_is_as_good_as_any() -> None:
    """Whatever lost its parent became the next victim, also in pools where only the last chunks of a chain count and
    nobody needs the parent: the most useful chunks went first."""
    world = World(arena_units=2, disk_units=())
    world.open(b"one")
    store(world, b"one", TRAILING, chain(3, 0, 1))
    store(world, b"one", TRAILING, chain(3))
    series = world.series(b"one", TRAILING)
    world.remove(series.root, series.pool, chain_key(0, 1))
    tail = series.rows[chain_key(0, 2)]
    assert world.columns.tick[tail] > 0
    assert world.state.dram.policy.victim(4096) != tail
    check(world)


def test_of_two_copies_the_newer_one_is_known_after_a_restart() -> None:
    """A chunk evicted from one volume and stored again on another is on both disks. The first volume's copy won, old or
    not; by the rule of the record's sequence it is the newer one, and the older one's place is free."""
    world = World(disk_units=(3, 4))
    world.open(b"one")
    for _ in range(2):
        store(world, b"one", A, chain(1))
        finish(world)
        series = world.series(b"one", A)
        row = series.rows[chain_key(0, 0)]
        old = world.place(row)[0]
        world.state.leave_ssd(row, 1)  # type: ignore[arg-type]
        world.state.ssd.usable[old] = False
        number = world.reserve(b"one", world.engines[b"one"].owners[0], A, 0, chain(2))
        assert number is not None
        world.commit(b"one", number, 0, 2, hold=False, durable=True)
        world.state.ssd.usable[old] = True
        finish(world)
        world.crash(0)
        check_recovered(world)
        check(world)
        world.open(b"one")


def test_a_take_over_spares_the_start_of_a_chain_in_use() -> None:
    """Only a chain's tail is touched, so its first chunks look old. A new model took its first segment from just there:
    the start of a chain in use, and with it all that hung on it, while a chain that nobody asked for stayed."""
    world = World(arena_units=4, disk_units=())
    world.open(b"one")
    store(world, b"one", A, chain(16))
    store(world, b"one", TRAILING, chain(16, 0, 1))
    lease = world.lease(b"one", A, chain(16))
    assert lease is not None
    world.release(b"one", lease)
    before = dict(world.series(b"one", A).rows)
    assert len(before) >= 14  # a sixteenth of the arena is evicted ahead of need
    assert store(world, b"one", BIG, chain(1))[0].stored
    assert world.series(b"one", A).rows == before
    assert not world.series(b"one", TRAILING).rows
    check(world)


def test_a_durable_store_of_one_chunk_does_not_push_out_another_of_its_batch() -> None:
    """EXISTS was given for a chunk on SSD only and for one in DRAM only; durable, the latter needed a place on the full
    volume, took it from the former, and the answer said EXISTS for both."""
    world = World(arena_units=3, disk_units=(1,))
    world.open(b"one")
    store(world, b"one", A, chain(5))
    finish(world)
    series = world.series(b"one", A)
    on_ssd = chain(5)
    for key in reversed(on_ssd):
        world.state.leave_dram(series.rows[key], 1)  # type: ignore[arg-type]
    world.state.ssd.usable[0] = False
    store(world, b"one", A, chain(1, 5))
    world.state.ssd.usable[0] = True
    batch = chain(6)
    number = world.reserve(b"one", world.engines[b"one"].owners[0], A, 0, [*batch, chain_key(1, 4)])
    assert number is not None
    answers = world.commit(b"one", number, 0, 7, hold=False, durable=True)
    assert answers[:6] == [Ack.EXISTS] * 6
    assert set(batch) <= set(series.rows)
    check(world)


# ---- scenes --------------------------------------------------------------------------------------------------------


def test_two_sessions_that_each_need_what_the_other_pins_are_answered_at_once() -> None:
    """Each pins as much as it may and asks for more: both are refused in the same call, nobody waits."""
    world = World(arena_units=4, disk_units=())
    held = {}
    for name, keys in ((b"one", chain(12)), (b"two", chain(16, 0, 1))):
        world.open(name)
        store(world, name, A, keys)
        held[name] = world.lease(name, A, keys)
    for name, number in ((b"one", 2), (b"two", 3)):
        made = world.reserve(name, world.engines[name].owners[0], A, 0, chain(16, 0, number))
        codes = [] if made is None else list(world.engines[name].session.reservations[made].codes)
        assert codes.count(Ack.GRANTED) < 16
        check(world)
    lease = held[b"two"]
    assert lease is not None
    world.release(b"two", lease)
    assert any(answer.stored for answer in store(world, b"one", A, chain(4, 12)))
    check(world)


def test_of_a_batch_of_twice_the_arena_the_longest_prefix_is_granted() -> None:
    world = World(arena_units=2, disk_units=())
    world.open(b"one")
    keys = chain(32)
    number = world.reserve(b"one", world.engines[b"one"].owners[0], A, 0, keys)
    assert number is not None
    codes = list(world.engines[b"one"].session.reservations[number].codes)
    assert codes == [Ack.GRANTED] * 8 + [Ack.REFUSED_FULL] * 24, "half of 16 slots for one session"
    assert all(answer.stored for answer in world.commit(b"one", number, 0, 32, hold=False)[:8])
    check(world)


def test_a_second_model_gets_its_share_of_a_full_arena() -> None:
    world = World(arena_units=4, disk_units=())
    world.open(b"one")
    for number in range(4):
        store(world, b"one", A, chain(12, 0, number))
    assert world.state.dram.slabs[0].free_slots(3 * 4096) == 0
    assert all(answer.stored for answer in store(world, b"one", BIG, chain(4)))
    check(world)


def test_dirty_chunks_are_kept_and_push_back() -> None:
    world = World(arena_units=2, disk_units=(4,))
    world.open(b"one")
    store(world, b"one", A, chain(8))
    assert world.state.dirty_bytes > world.state.arena_bytes / 4
    number = world.reserve(b"one", world.engines[b"one"].owners[0], A, 0, chain(9))
    assert number is None
    assert world.ledger.value("acks_total", "refused_backpressure") == 1
    finish(world)
    assert store(world, b"one", A, chain(1, 8))[0].stored


def test_orphans_are_refused_and_a_child_stays_hidden_until_its_parent_is_there(world: World) -> None:
    owner = world.engines[b"one"].owners[0]
    assert world.reserve(b"one", owner, A, 0, chain(1, 3)) is None
    parent = world.reserve(b"one", owner, A, 0, chain(1))
    child = world.reserve(b"one", owner, A, 0, chain(1, 1))
    assert parent is not None
    assert child is not None
    world.commit(b"one", child, 0, 1, hold=False)
    series = world.series(b"one", A)
    both = b"".join(chain(2))
    assert world.planner.loads.lookup(series, both[32:]) == b""
    world.commit(b"one", parent, 0, 1, hold=False)
    assert world.planner.loads.lookup(series, both) == bytes([Tier.DRAM, Tier.DRAM])


def test_a_joint_chunk_whose_other_rank_never_comes_is_given_up(world: World) -> None:
    assert store(world, b"one", TWO_SHARDS, chain(2)) == [Ack.PARTIAL] * 2
    assert world.state.reserved_bytes == 2 * 8192
    world.expire(world.limits.lease_ttl_s + 1)
    assert world.state.reserved_bytes == 0
    assert world.ledger.value("incomplete_chunks_total") == 2
    check(world)


def test_a_session_that_left_is_kept_until_its_last_writer_is_gone(world: World) -> None:
    """Shared memory cannot refuse a late write: the slot stays in limbo while the process lives."""
    owner = world.engines[b"one"].owners[0]
    store(world, b"one", A, chain(1))
    world.lease(b"one", A, chain(1))
    world.reserve(b"one", owner, A, 0, chain(3))
    world.close(b"one")
    assert world.state.sessions[b"one"].held_bytes == 3 * 4096, "the lease ended, the reservation did not"
    world.expire(1e6)
    world.scribble()
    check(world)
    world.owner_gone(owner)
    assert not world.state.sessions
    check(world)


def test_a_session_without_writers_leaves_at_once(world: World) -> None:
    store(world, b"one", TWO_SHARDS, chain(1))
    world.close(b"one")
    assert not world.state.sessions
    assert world.state.reserved_bytes == 0


def test_a_corrupt_record_is_quarantined_and_only_it(world: World) -> None:
    store(world, b"one", A, chain(3))
    finish(world)
    world.crash(0)
    world.open(b"one")
    world.lease(b"one", A, chain(3))
    world.finish_read(1, CORRUPT)
    finish(world)
    check(world)
    series = world.series(b"one", A)
    assert world.planner.loads.lookup(series, b"".join(chain(3))) == bytes([Tier.DRAM])
    assert chain_key(0, 2) in series.rows
    assert world.ledger.value("quarantined_total") == 1


def test_wrong_requests_are_refused_in_words(world: World) -> None:
    engine = world.engines[b"one"]
    series = world.series(b"one", A)
    with pytest.raises(Invalid, match="come in pairs"):
        world.planner.stores.reserve(engine.session, 1, series, 0, bytes(33), bytes(33))
    with pytest.raises(Invalid, match="shard 1"):
        world.planner.stores.reserve(engine.session, 1, series, 1, bytes(32), NO_PARENT)
    with pytest.raises(Invalid, match="handle"):
        world.planner.series(engine.session, 12345, 0)
    with pytest.raises(Closed, match="gone"):
        world.planner.stores.commit(engine.session, 777, 0, 1, False)
    number = world.reserve(b"one", engine.owners[0], A, 0, chain(2))
    assert number is not None
    with pytest.raises(Invalid, match="not in reservation"):
        world.planner.stores.commit(engine.session, number, 1, 2, False)


def test_a_chain_longer_than_the_arena_keeps_its_start_whole() -> None:
    """Without SSD a chain of 120 chunks went into an arena of 64, batch after batch. The only leaf was the end of what
    was stored before, the parent of the next batch: it was evicted for its own child (or ahead of need), and only 3 of
    59 resident chunks were reachable. The start stays now, and what does not fit is refused."""
    world = World(arena_units=3, disk_units=())
    world.open(b"one")
    keys = chain(40)
    acks = [ack for start in range(0, 40, 4) for ack in store(world, b"one", A, keys[start : start + 4])]
    run = len(acks)
    assert 8 <= run < 40, "the arena holds a part of the chain"
    assert all(ack.stored for ack in acks)
    assert set(world.series(b"one", A).rows) == set(keys[:run])
    assert not world.columns.pins.any(), "a refused batch left its parent pinned"
    check(world)


def test_a_segment_that_the_disk_had_no_room_for_is_not_tried_again_and_again() -> None:
    """A disk of 300 MiB under a cap of 10 GiB: the first segment that could not be allocated stayed the open one, every
    later store was given a slot in it and lost its SSD copy, and nothing was recycled any more."""
    world = World(arena_units=4, disk_units=(3,))
    world.open(b"one")
    store(world, b"one", A, chain(2))
    finish(world)
    slab = world.state.ssd.slabs[0]
    slab.may_take = 0
    slab.unback(0)
    before = {segment.first_unit for segment in slab.segments()}
    assert slab.allocate(slab.segments()[0].slot_bytes) is None, "a slot of the unbacked segment was handed out"
    slab.may_take = None
    assert slab.allocate(slab.segments()[0].slot_bytes) is not None
    assert {segment.first_unit for segment in slab.segments()} > before


def test_roots_that_were_only_looked_up_are_forgotten_and_their_numbers_used_again() -> None:
    """A salt for each user made a root for each, and a look-up was enough: 20 000 of them held 52 MB after the client
    had gone, and at 65 536 the daemon would have refused every new one until its restart."""
    planner = World(arena_units=3, disk_units=()).planner
    session = planner.session_opened(b"many", "")
    kept, _ = planner.open_root(session, namespace_of(0), RequestIdentity(salt="kept"))
    series = planner.series(session, kept.handle, 0)
    made, _, _ = planner.stores.reserve(session, 1, series, 0, bytes([7]) * 32, NO_PARENT)
    assert made is not None
    planner.stores.commit(session, made.number, 0, 1, hold=False)
    for number in range(3000):
        planner.open_root(session, namespace_of(0), RequestIdentity(salt=str(number)))
        if number % 100 == 99:
            planner.session_closed(b"many")
            session = planner.session_opened(b"many", "")
    assert len(planner.state.roots) <= 1100
    assert len(planner.state.series) <= 1100
    again, fresh = planner.open_root(session, namespace_of(0), RequestIdentity(salt="kept"))
    assert (again is kept, fresh) == (True, False)
    assert planner.loads.lookup(planner.series(session, again.handle, 0), bytes([7]) * 32) == bytes([Tier.DRAM])


def namespace_of(model: int) -> BaseNamespace:
    return BaseNamespace(model=f"model {model}", weights="none", pools=(one_part_pool(4096),))
