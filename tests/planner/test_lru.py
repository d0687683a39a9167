"""LeafLRU against a leaf-first LRU by brute force, on random forests: row numbers that serve many chunks of several
slot sizes, holds, orphans, parents that come late."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvstore.index import NOWHERE
from kvstore.policy import LeafLRU

ROWS = 6
SIZES = (4096, 8192)
some_row = st.integers(0, ROWS - 1)


class Forest:
    """The two columns that a policy reads."""

    def __init__(self) -> None:
        self.parent = np.full(ROWS, NOWHERE, np.int32)
        self.tick = np.zeros(ROWS, np.int64)


class LRUMachine(RuleBasedStateMachine):
    """`members`: row -> slot size. The oracle scans them all for each question."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Forest()
        self.size = dict.fromkeys(range(ROWS), SIZES[0])
        self.members: set[int] = set()
        self.held: set[int] = set()
        self.linked: set[int] = set()
        """Rows in use, members of this tier or not (they may be in another one)."""
        self.ticks = 0
        self.policy = LeafLRU(self.rows, lambda row: self.size[row], lambda row: row in self.held)

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks

    def leaves(self, size: int) -> list[int]:
        parents = {int(self.rows.parent[row]) for row in self.members}
        return [r for r in self.members - parents - self.held if self.size[r] == size]

    @rule(
        rows=st.lists(some_row, unique=True, max_size=4),
        size=st.sampled_from(SIZES),
        parent=some_row,
        join=st.booleans(),
    )
    def new_chunks(self, rows: list[int], size: int, parent: int, join: bool) -> None:
        """Free row numbers become a chain of chunks of one size, in this tier or (yet) in another one only."""
        new = [row for row in rows if row not in self.linked and row not in self.held]
        if not (parent in self.linked and self.size[parent] == size):
            parent = NOWHERE
        for row in new:
            self.size[row] = size
            self.rows.parent[row] = parent
            self.rows.tick[row] = self.tick()
            self.linked.add(row)
            parent = row
        if join:
            self.added(new)

    @rule(rows=st.lists(some_row, unique=True, max_size=4))
    def join(self, rows: list[int]) -> None:
        self.added(rows)

    def added(self, rows: list[int]) -> None:
        new = [row for row in rows if row in self.linked and row not in self.members]
        self.policy.added(new)
        self.members |= set(new)

    @rule(child=some_row, parent=some_row)
    def parent_comes_late(self, child: int, parent: int) -> None:
        """An orphan's parent is stored again; the row may or may not be a member yet."""
        if (
            {child, parent} <= self.linked
            and self.rows.parent[child] == NOWHERE
            and not self.hangs_on(parent, child)
            and self.size[child] == self.size[parent]
        ):
            self.rows.parent[child] = parent
            self.policy.relinked(child)

    def hangs_on(self, row: int, ancestor: int) -> bool:
        while row != NOWHERE:
            if row == ancestor:
                return True
            row = int(self.rows.parent[row])
        return False

    @rule(row=some_row)
    def touch(self, row: int) -> None:
        self.rows.tick[row] = self.tick()

    @rule(row=some_row)
    def hold(self, row: int) -> None:
        if row in self.linked:
            self.held.add(row)

    @rule(rows=st.lists(some_row, unique=True, max_size=4))
    def release(self, rows: list[int]) -> None:
        self.held -= set(rows)
        self.policy.released(np.array(rows, np.intp))

    @rule(row=some_row)
    def leaves_the_tier(self, row: int) -> None:
        """For whatever reason, from the middle of a chain too."""
        if row in self.members:
            self._remove(row)

    def _remove(self, row: int) -> None:
        parent = int(self.rows.parent[row])
        self.members.discard(row)
        orphaned_leaf = parent >= 0 and parent in self.members
        siblings = any(self.rows.parent[m] == parent for m in self.members)
        expected = max(self.rows.tick[parent], self.rows.tick[row]) if orphaned_leaf and not siblings else None
        self.policy.removed(row)
        if expected is not None:
            assert self.rows.tick[parent] == expected, "a parent inherits its last child's recency"

    @rule(row=some_row, reachable=st.booleans())
    def leaves_the_system(self, row: int, reachable: bool) -> None:
        """The row number is free; its children stay, first victims where nothing can reach them."""
        if row not in self.linked or row in self.held:
            return
        if row in self.members:
            self._remove(row)
        for child in [r for r in self.linked if self.rows.parent[r] == row]:
            self.policy.unlinked(child)
            if not reachable:
                self.policy.orphaned(child)
                assert child not in self.members or self.rows.tick[child] == 0
            self.rows.parent[child] = NOWHERE
        self.rows.parent[row] = NOWHERE
        self.linked.discard(row)

    @precondition(lambda self: self.members)
    @rule(size=st.sampled_from(SIZES), count=st.integers(1, 3))
    def evict(self, size: int, count: int) -> None:
        """Asked only now and then: asking puts stale entries right, and that must not be needed."""
        for _ in range(count):
            leaves = self.leaves(size)
            oldest, victim = self.policy.oldest(size), self.policy.victim(size)
            if not leaves:
                assert victim is None
                assert oldest is None
                return
            first = min(int(self.rows.tick[row]) for row in leaves)
            assert oldest == first
            assert victim in leaves
            assert self.rows.tick[victim] == first
            self._remove(victim)

    @invariant()
    def children_are_known(self) -> None:
        parents = {int(self.rows.parent[row]) for row in self.members}
        assert [self.policy.has_children(row) for row in range(ROWS)] == [row in parents for row in range(ROWS)]

    def teardown(self) -> None:
        """Nothing held: every member can be named, leaves first, until none is left."""
        self.release(list(range(ROWS)))
        self.held.clear()
        for size in SIZES:
            while any(self.size[row] == size for row in self.members):
                self.evict(size, 1)


def test_leaf_first_lru_against_brute_force() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        LRUMachine,
        settings=settings(max_examples=150, stateful_step_count=60, derandomize=True, deadline=None, database=None),
    )


def test_recovered_rows_come_oldest_first_and_leaves_first() -> None:
    rows = Forest()
    rows.parent[:6] = [NOWHERE, 0, 1, NOWHERE, 3, NOWHERE]
    rows.tick[:6] = [1, 2, 6, 4, 5, 3]
    policy = LeafLRU(rows, lambda _: 4096, lambda _: False)
    policy.added_all(np.arange(6), 4096)
    order = []
    while (row := policy.victim(4096)) is not None:
        order.append(row)
        policy.removed(row)
    assert order == [5, 4, 3, 2, 1, 0], "a parent takes over its child's recency, so a chain goes from its end"


def test_the_heap_does_not_grow_with_accesses() -> None:
    """Touching and holding a chunk a thousand times costs nothing and leaves one entry."""
    rows = Forest()
    held: set[int] = set()
    policy = LeafLRU(rows, lambda _: 4096, held.__contains__)
    policy.added([0, 1])
    for tick in range(1, 1001):
        held.add(0)
        rows.tick[0] = tick
        assert policy.victim(4096) == 1
        held.discard(0)
        policy.released(np.array([0]))
    assert len(policy._heaps[4096]) == 2
