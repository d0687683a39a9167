"""The real manager, with its two notices from the server written down."""

from __future__ import annotations

import asyncio

from kvstore.arena import Arena
from kvstore.clock import MonotonicClock
from kvstore.ledger import Ledger
from kvstore.manager import Manager
from kvstore.units import MiB

ARENA_BYTES = 64 * MiB


class WatchedManager(Manager):
    """Does what Manager does."""

    def __init__(self, arena: Arena, ledger: Ledger, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(arena, [], ledger=ledger, clock=MonotonicClock(), loop=loop)
        self.events: list[tuple[str, bytes | int]] = []
        """("session_closed", session) and ("owner_gone", owner), in order."""

    def session_closed(self, session: bytes) -> None:
        self.events.append(("session_closed", session))
        super().session_closed(session)

    def owner_gone(self, owner: int) -> None:
        self.events.append(("owner_gone", owner))
        super().owner_gone(owner)
