"""The planner's face: one object that holds the state and its four departments, and the life of sessions and roots."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.clock import Clock
from kvstore.errors import Invalid, Throttled
from kvstore.index import ORPHAN, Root, Series
from kvstore.layout import slot_layout
from kvstore.ledger import Ledger
from kvstore.namespace import BaseNamespace, RequestIdentity, check_identity, check_namespace, root_digest
from kvstore.planner.budget import WriteBudget
from kvstore.planner.loads import Loads
from kvstore.planner.records import Limits, Session
from kvstore.planner.recovery import Recovery
from kvstore.planner.removal import Removal
from kvstore.planner.state import State
from kvstore.planner.stores import Stores
from kvstore.planner.write_behind import WriteBehind
from kvstore.slab import Slab

COLLECT_ROOTS = 1024
"""Roots before those that nothing names are looked for; then at each doubling."""


class Planner:
    def __init__(
        self,
        arena: Slab,
        volumes: Sequence[Slab],
        generations: npt.NDArray[np.uint64],
        parts_ready: npt.NDArray[np.uint32],
        clock: Clock,
        ledger: Ledger,
        limits: Limits | None = None,
        policy: str = "lru",
        budget: WriteBudget | None = None,
    ) -> None:
        self.state = State(
            arena, volumes, generations, parts_ready, clock, ledger, limits or Limits(), policy, budget
        )  # fmt: skip
        self._collect_at = COLLECT_ROOTS
        self.loads = Loads(self.state)
        self.behind = WriteBehind(self.state)
        self.stores = Stores(self.state, self.behind)
        self.removal = Removal(self.state, self.stores)
        self.recovery = Recovery(self.state)

    def session_opened(self, name: bytes, label: str) -> Session:
        """Idempotent: one session has many connections."""
        session = self.state.sessions.get(name)
        if session is None:
            session = self.state.sessions[name] = Session(name, label)
        session.connected = True
        return session

    def session_closed(self, name: bytes) -> None:
        """Its last connection is gone: leases and pins end. Reservations stay until their writers are gone."""
        session = self.state.sessions.get(name)
        if session is None:
            return
        for number in list(session.leases):
            self.loads.release(session, number)
        session.connected = False
        session.roots.clear()
        self._forget(session)

    def owner_gone(self, owner: int) -> int:
        """A process can write no more. Returns how many reservations that ended."""
        ended = self.stores.owner_gone(owner)
        for session in list(self.state.sessions.values()):
            self._forget(session)
        return ended

    def expire(self) -> None:
        """About once a second: leases past their time, chunks whose other ranks never came, sessions that left."""
        self.loads.expire()
        for session in list(self.state.sessions.values()):
            self.stores.expire(session, self.state.clock.now() - self.state.limits.lease_ttl_s)
            self._forget(session)

    def open_root(self, session: Session, namespace: BaseNamespace, identity: RequestIdentity) -> tuple[Root, bool]:
        """The root of this identity, and whether it is new to this daemon. Raises Invalid, Throttled."""
        check_namespace(namespace)
        check_identity(identity)
        digest = root_digest(namespace, identity)
        state = self.state
        known = state.roots.get(digest)
        if known is None and len(state.roots) >= self._collect_at:
            self.recovery.collect_roots()
            self._collect_at = min(state.limits.roots, max(COLLECT_ROOTS, 2 * len(state.roots)))
        if known is None and len(state.roots) >= state.limits.roots:
            raise Throttled(f"{len(state.roots)} roots are open, the limit: use fewer salts, tenants or epochs")
        layouts = [slot_layout(pool) for pool in namespace.pools]
        for pool, layout in zip(namespace.pools, layouts, strict=True):
            if not state.dram.fits(layout.slot_bytes):
                raise Invalid(
                    f"a chunk of pool {pool.name!r} takes {layout.slot_bytes} bytes, and the arena of "
                    f"{state.arena_bytes} bytes has no room for a segment of them: enlarge arena.size"
                )
        fresh = known is None or known.description == b"{}"
        root = self.recovery.root(digest)
        if fresh:
            root.description = msgspec.json.encode({"namespace": namespace, "identity": identity})
        for number, (pool, layout) in enumerate(zip(namespace.pools, layouts, strict=True)):
            series = self.recovery.series(root, number, layout.slot_bytes)
            if series.layout is None:
                series.layout, series.rule = layout, pool.rule
                if pool.rule != "all":
                    self._show_orphans(series)
        session.roots[root.handle] = root
        return root, fresh

    def series(self, session: Session, handle: int, pool: int) -> Series:
        """The series that a request names. Raises Invalid for a handle that this session has not opened."""
        root = session.roots.get(handle)
        if root is None:
            raise Invalid(f"root handle {handle} is not open in this session: open_root first")
        series = root.series.get(pool)
        if series is None or series.layout is None:
            raise Invalid(f"pool {pool} is not in this namespace")
        return series

    def _show_orphans(self, series: Series) -> None:
        for row in series.orphans:
            self.state.columns.flags[row] &= 0xFF ^ ORPHAN
        series.orphans.clear()
        series.waiting.clear()

    def _forget(self, session: Session) -> None:
        """Drop a session that has no connection and holds nothing any more."""
        if session.connected or session.reservations:
            return
        for chunk in list(session.joint.values()):
            self.stores.give_up(session, chunk)
        del self.state.sessions[session.name]
