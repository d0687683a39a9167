"""The planner against an independent model: random lives of engines, I/O threads and crashes, checked after every step.

Short and always the same in CI; `--slow` looks for new trouble with many more examples.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from planner_checks import check, check_losses, check_recovered, living
from planner_world import CHAIN, CORRUPT, FULL, TARGETS, UNAVAILABLE, World, chain_key

NAMES = (b"one", b"two", b"three")
names = st.sampled_from(NAMES)
places = st.integers(0, len(TARGETS) - 1)
indexes = st.integers(0, 1 << 16)
slices = st.tuples(st.integers(0, 2), st.integers(0, CHAIN - 1), st.integers(1, CHAIN)).map(
    lambda t: [chain_key(t[0], p) for p in range(t[1], min(CHAIN, t[1] + t[2]))]
)
lists = slices | st.lists(st.tuples(st.integers(0, 2), st.integers(0, CHAIN - 1)), min_size=1, max_size=4).map(
    lambda pairs: [chain_key(c, p) for c, p in pairs]
)
prefixes = st.tuples(st.integers(0, 2), st.integers(1, CHAIN)).map(lambda t: [chain_key(t[0], p) for p in range(t[1])])


class PlannerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.before = set(living(self.world))
        self.since_s = 0.0

    @initialize(
        arena_units=st.sampled_from([2, 3, 4, 7]),
        disk_units=st.sampled_from([(), (3,), (3, 4), (2, 2)]),
        stored=st.lists(st.tuples(places, st.integers(0, 2), st.booleans()), max_size=6),
    )
    def start(self, arena_units: int, disk_units: tuple[int, ...], stored: list[tuple[int, int, bool]]) -> None:
        """A store that has lived a little already."""
        self.world = World(arena_units, disk_units)
        for name in NAMES:
            self.world.open(name)
        for where, chain, written in stored:
            self.world_stores(NAMES[0], where, [chain_key(chain, p) for p in range(CHAIN)], False)
            if written:
                self.all_writes_end()

    def world_stores(self, name: bytes, where: int, keys: list[bytes], hold: bool) -> None:
        """All shards, reserved and committed in one go, as engines mostly do."""
        layout = self.world.series(name, where).layout
        assert layout is not None
        for shard in range(layout.shards):
            number = self._reserve(name, where, shard, shard, keys)
            if number is not None:
                self.world.commit(name, number, 0, len(keys), hold)

    def connected(self, name: bytes) -> bool:
        session = self.world.state.sessions.get(name)
        return session is not None and session.connected

    # ---- engines -------------------------------------------------------------------------------------------------

    @rule(name=names)
    def open(self, name: bytes) -> None:
        self.world.open(name)

    @rule(name=names)
    def close(self, name: bytes) -> None:
        if self.connected(name):
            self.world.close(name)

    @rule(index=indexes, name=names)
    def owner_dies(self, index: int, name: bytes) -> None:
        if name in self.world.engines:
            owners = self.world.engines[name].owners
            self.world.owner_gone(owners[index % len(owners)])

    @rule(name=names, where=places, owner=indexes, shard=st.integers(0, 1), keys=prefixes | lists)
    def reserve(self, name: bytes, where: int, owner: int, shard: int, keys: list[bytes]) -> None:
        if self.connected(name):
            self._reserve(name, where, owner, shard, keys)

    def _reserve(self, name: bytes, where: int, owner: int, shard: int, keys: list[bytes]) -> int | None:
        owners = self.world.engines[name].owners
        layout = self.world.series(name, where).layout
        assert layout is not None
        return self.world.reserve(name, owners[owner % len(owners)], where, shard % layout.shards, keys)

    @rule(name=names, where=places, keys=prefixes, hold=st.booleans())
    def store(self, name: bytes, where: int, keys: list[bytes], hold: bool) -> None:
        if self.connected(name):
            self.world_stores(name, where, keys, hold)

    @rule(name=names, where=places, chain=st.integers(0, 2), count=st.integers(1, 6))
    def extend(self, name: bytes, where: int, chain: int, count: int) -> None:
        """A request goes on from where the store's run of its chain ends."""
        if self.connected(name):
            rows = self.world.series(name, where).rows
            first = next((p for p in range(CHAIN) if chain_key(chain, p) not in rows), 0)
            self.world_stores(name, where, [chain_key(chain, p) for p in range(first, first + count)], False)

    @rule(name=names, where=places, chain=st.integers(0, 2), count=st.integers(1, CHAIN), leave=st.booleans())
    def load(self, name: bytes, where: int, chain: int, count: int, leave: bool) -> None:
        if self.connected(name):
            lease = self.world.lease(name, where, [chain_key(chain, p) for p in range(count)])
            if lease is not None and not leave:
                self.all_reads_end()
                self.world.release(name, lease)

    def _reservation(self, index: int) -> tuple[bytes, int] | None:
        made = [(s.name, n) for s in self.world.state.sessions.values() for n in s.reservations]
        return made[index % len(made)] if made else None

    @rule(index=indexes, first=st.integers(0, 11), count=st.integers(0, 12), hold=st.booleans(), durable=st.booleans())
    def commit(self, index: int, first: int, count: int, hold: bool, durable: bool) -> None:
        chosen = self._reservation(index)
        if chosen is not None and self.connected(chosen[0]):
            made = self.world.state.sessions[chosen[0]].reservations[chosen[1]]
            first %= len(made.codes)
            self.world.commit(*chosen, first, min(count, len(made.codes) - first), hold, durable)

    @rule(index=indexes)
    def abort(self, index: int) -> None:
        chosen = self._reservation(index)
        if chosen is not None:
            self.world.abort(*chosen)

    @rule()
    def scribble(self) -> None:
        self.world.scribble()

    @rule(name=names, where=places, keys=prefixes | lists)
    def lookup(self, name: bytes, where: int, keys: list[bytes]) -> None:
        if self.connected(name):
            self.world.lookup(name, where, keys)

    @rule(name=names, where=places, keys=prefixes | lists, ttl_s=st.sampled_from([1.0, 30.0, 1e6]))
    def lease(self, name: bytes, where: int, keys: list[bytes], ttl_s: float) -> None:
        if self.connected(name):
            self.world.lease(name, where, keys, ttl_s)

    @rule(index=indexes, renew=st.booleans())
    def end_lease(self, index: int, renew: bool) -> None:
        held = [(s, n) for s in self.world.state.sessions.values() for n in s.leases]
        if held:
            session, number = held[index % len(held)]
            if renew:
                self.world.planner.loads.renew(session, number, 30.0)
            else:
                self.world.release(session.name, number)

    @rule(seconds=st.sampled_from([0.5, 5.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.expire(seconds)

    # ---- I/O threads ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.writes)
    @rule(index=indexes, error=st.sampled_from([None, None, None, FULL, UNAVAILABLE]))
    def write_ends(self, index: int, error: FULL.__class__ | None) -> None:  # type: ignore[name-defined]
        self.world.finish_write(index % len(self.world.writes), error)

    @rule()
    def all_writes_end(self) -> None:
        for _ in range(len(self.world.writes)):
            self.world.finish_write(0)

    @precondition(lambda self: self.world.reads)
    @rule(
        index=indexes,
        error=st.sampled_from([None, None, CORRUPT, UNAVAILABLE]),
        lost=st.sampled_from([False] * 4 + [True]),
    )
    def read_ends(self, index: int, error: FULL.__class__ | None, lost: bool) -> None:  # type: ignore[name-defined]
        self.world.finish_read(index % len(self.world.reads), error, lost and error is None)

    @rule()
    def all_reads_end(self) -> None:
        for _ in range(len(self.world.reads)):
            self.world.finish_read(0)

    @precondition(lambda self: self.world.deletes)
    @rule(index=indexes, fails=st.sampled_from([False, False, True]))
    def delete_ends(self, index: int, fails: bool) -> None:
        self.world.finish_delete(index % len(self.world.deletes), fails)

    # ---- operators and fate --------------------------------------------------------------------------------------

    @rule(index=indexes)
    def remove(self, index: int) -> None:
        alive = sorted(living(self.world))
        if alive:
            self.world.remove(*alive[index % len(alive)])

    @rule(index=indexes, sure=st.integers(0, 3))
    def purge(self, index: int, sure: int) -> None:
        roots = sorted(self.world.state.roots)
        if roots and sure == 0:
            self.world.purge(roots[index % len(roots)])

    @rule(volume=indexes, what=st.sampled_from(["floor", "no floor", "no floor", "read-only"]))
    def volume_changes(self, volume: int, what: str) -> None:
        space = self.world.state.ssd
        if space.slabs:
            number = volume % len(space.slabs)
            if "floor" in what:
                space.slabs[number].may_take = None if what == "no floor" else 0
            else:
                space.usable[number] = False

    @rule(bytes_per_s=st.sampled_from([0, 0, 2000]))
    def budget_changes(self, bytes_per_s: int) -> None:
        self.world.budget.change(bytes_per_s, 0)

    @rule(landed=indexes, sure=st.integers(0, 3), reopen=st.booleans())
    def crash(self, landed: int, sure: int, reopen: bool) -> None:
        if sure == 0:
            self.world.crash(landed)
            check_recovered(self.world)
            self.before = set()
            if reopen:
                self.world.open(NAMES[0])

    @invariant()
    def whole_state(self) -> None:
        check(self.world)
        check_losses(self.world, self.before, self.since_s)
        self.before = set(living(self.world))
        self.world.clock.advance(0.001)
        self.since_s = self.world.clock.now()

    def teardown(self) -> None:
        """Everybody leaves and all I/O ends: nothing is held, and what is left can be evicted down to nothing."""
        world = self.world
        while world.writes or world.reads or world.deletes:
            while world.writes:
                world.finish_write(0)
            while world.reads:
                world.finish_read(0)
            while world.deletes:
                world.finish_delete(0)
        for name, engine in world.engines.items():
            world.close(name)
            for owner in list(engine.owners):
                world.owner_gone(owner)
        world.expire(100.0)
        check(world)
        state = world.state
        assert not state.sessions
        assert state.pinned_bytes == state.reserved_bytes == state.dirty_bytes == 0
        for space in (state.dram, state.ssd):
            sizes = {size for slab in space.slabs for size in slab.slot_sizes()}
            for size in sizes:
                while (row := space.policy.victim(size)) is not None:
                    (state.leave_dram if space is state.dram else state.leave_ssd)(row, 1)  # type: ignore[arg-type]
        assert state.dram.used_bytes == 0, "a chunk that the policy cannot name"
        assert len(state.columns) == 0 or not all(state.ssd.usable)
        check(world)


QUICK = settings(
    max_examples=80,
    stateful_step_count=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_random_lives() -> None:
    run_state_machine_as_test(PlannerMachine, settings=QUICK)  # type: ignore[no-untyped-call]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_random_lives() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        PlannerMachine, settings=settings(QUICK, max_examples=3000, stateful_step_count=100, derandomize=False)
    )


def long_life(seed: int, steps: int) -> PlannerMachine:
    """The same machine led by plain dice: longer lives than Hypothesis makes, where rows and slots serve many times.

    Of the rules, those that engines live by come often, those that end everything seldom.
    """
    dice = random.Random(seed)
    machine = PlannerMachine()
    machine.start(dice.choice([2, 3, 4, 7]), dice.choice([(), (3,), (3, 4), (2, 2)]), [])  # type: ignore[call-arg]
    for _ in range(steps):
        step(machine, dice)
        machine.whole_state()
    return machine


def step(machine: PlannerMachine, dice: random.Random) -> None:
    name, where, index = dice.choice(NAMES), dice.randrange(len(TARGETS)), dice.randrange(1 << 16)
    chain, count = dice.randrange(3), dice.randint(1, CHAIN)
    run = [chain_key(chain, p) for p in range(count)]
    picked = [chain_key(dice.randrange(3), dice.randrange(CHAIN)) for _ in range(3)]
    error = dice.choice([None, None, None, FULL, UNAVAILABLE])
    moves: list[tuple[int, Callable[[], object]]] = [
        (8, lambda: machine.store(name, where, run, dice.random() < 0.3)),
        (8, lambda: machine.extend(name, where, chain, dice.randint(1, 6))),
        (12, lambda: machine.load(name, where, chain, count, dice.random() < 0.3)),
        (6, lambda: machine.reserve(name, where, index, index & 1, dice.choice([run, picked]))),
        (6, lambda: machine.commit(index, dice.randrange(12), dice.randrange(13), index & 1, index & 2)),  # type: ignore[arg-type]
        (3, lambda: machine.abort(index)),
        (2, lambda: machine.lookup(name, where, dice.choice([run, picked]))),
        (2, lambda: machine.lease(name, where, picked, dice.choice([1.0, 1e6]))),
        (6, lambda: machine.end_lease(index, dice.random() < 0.1)),
        (3, lambda: machine.time_passes(dice.choice([0.5, 5.0, 31.0]))),
        (8, machine.all_writes_end),
        (8, lambda: machine.world.writes and machine.write_ends(index, error)),
        (6, lambda: machine.world.reads and machine.read_ends(index, dice.choice([None, CORRUPT, UNAVAILABLE]), False)),
        (4, machine.all_reads_end),
        (3, lambda: machine.world.deletes and machine.delete_ends(index, dice.random() < 0.1)),
        (3, lambda: machine.remove(index)),
        (1, lambda: machine.purge(index, dice.randrange(3))),
        (1, lambda: machine.owner_dies(index, name)),
        (1, lambda: machine.close(name)),
        (2, lambda: machine.open(name)),
        (1, lambda: machine.volume_changes(index, dice.choice(["floor", "no floor", "no floor"]))),
        (1, lambda: machine.volume_changes(index, "read-only") if dice.random() < 0.05 else None),
        (1, lambda: machine.budget_changes(dice.choice([0, 0, 0, 2000]))),
        (1, lambda: machine.crash(index, dice.randrange(8), True)),
        (1, machine.scribble),
    ]
    dice.choices([move for _, move in moves], [weight for weight, _ in moves])[0]()


@pytest.mark.parametrize("seed", range(8))
def test_long_lives(seed: int) -> None:
    long_life(seed, 400).teardown()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_very_many_long_lives() -> None:
    for seed in range(100, 1100):
        long_life(seed, 1500).teardown()
