"""One life of the connection to one daemon: its arena as mapped here, and the pool of connections to it.

A link never comes back: after any break the background thread makes another, with another mapping. Everything that was
granted (leases, reservations, root handles) holds its link and its mapping, so an offset of the old arena can never be
used with the new one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from kvstore.arena import ArenaMapping
from kvstore.client.connection import Connection
from kvstore.errors import Throttled, Unavailable
from kvstore.wire.messages import Message, Welcome

MAX_CONNECTIONS = 16
"""Calls of one client under way at a time; further ones wait for a connection, within their deadline."""


class Link:
    """Thread-safe. `dead` is final."""

    def __init__(self, welcome: Welcome, mapping: ArenaMapping, open_connection: Callable[[float], Connection]) -> None:
        """open_connection(deadline_s) makes one more connection to the same daemon; Raises as `connection.connect`."""
        self.welcome = welcome
        self.mapping = mapping
        self.dead = False
        self.reason = ""
        self.owed: deque[Message] = deque()
        """One-way messages of objects that were dropped without a release, for the background thread to send."""
        self._open_connection = open_connection
        self._free = threading.Condition()
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._opening = 0
        self._reservations = 0

    @property
    def writing(self) -> bool:
        """Whether a thread of this process may still write into slots reserved over this link."""
        with self._free:
            return self._reservations > 0 or len(self._all) > len(self._idle) or self._opening > 0

    @property
    def owes(self) -> bool:
        """Whether the background thread should soon look after idle connections or `owed`."""
        with self._free:
            return bool(self.owed) or any(connection.owes for connection in self._idle)

    def count_reservation(self, change: int) -> None:
        with self._free:
            self._reservations += change

    def check_out(self, deadline_s: float) -> Connection:
        """A connection for this thread alone, until `check_in`.

        Raises Unavailable (the link is dead), Throttled (all are busy until the deadline), or as `connection.connect`.
        """
        with self._free:
            while True:
                if self.dead:
                    raise Unavailable(self.reason)
                if self._idle:
                    return self._idle.pop()
                if len(self._all) + self._opening < MAX_CONNECTIONS:
                    break
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise Throttled("all connections of this client are busy")
                self._free.wait(left_s)
            self._opening += 1
        opened: list[Connection] = []
        try:
            opened.append(self._open_connection(deadline_s))
        finally:
            with self._free:
                self._opening -= 1
                self._all.update(opened)
                self._free.notify()
        if self.dead:
            self.check_in(opened[0])
            raise Unavailable(self.reason)
        return opened[0]

    def check_in(self, connection: Connection) -> None:
        """Back to the pool; the answers that nobody fetched are abandoned. A broken connection ends the link."""
        with suppress(Unavailable):
            connection.abandon_all()
        if connection.broken:
            self.die("a connection to the daemon broke")
        with self._free:
            if self.dead:
                self._all.discard(connection)
                connection.close()
            else:
                self._idle.append(connection)
                self._free.notify()

    def post(self, message: Message) -> None:
        """Send a one-way message over whatever connection is free, else leave it to the background thread."""
        with self._free:
            if self.dead:
                return
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            self.owed.append(message)
            return
        with suppress(Unavailable):
            connection.post(message)
        self.check_in(connection)

    def idle_debtors(self) -> list[Connection]:
        """Take out the idle connections that owe something; each must be checked in."""
        with self._free:
            debtors = [connection for connection in self._idle if connection.owes]
            if debtors:
                self._idle = [connection for connection in self._idle if connection not in debtors]
            return debtors

    def die(self, reason: str) -> None:
        """End it for all: waiting threads wake with Unavailable, calls to come fail at once. Idempotent."""
        with self._free:
            if self.dead:
                return
            self.dead = True
            self.reason = reason
            for connection in self._all:
                connection.interrupt()
            for connection in self._idle:
                self._all.discard(connection)
                connection.close()
            self._idle.clear()
            self._free.notify_all()

    def close_inherited(self) -> None:
        """In a forked child: close the copies of the sockets. Takes no lock: its holder may not exist here."""
        self.dead = True
        self.reason = "this is a forked child of the process that made the client"
        for connection in list(self._all):
            connection.close()
