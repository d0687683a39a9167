"""How a call gets a connection, and what its failure means for those to come. Shared by all roots of a client."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.client.connection import Connection, DeadlineMissed
from kvstore.client.copying import Copier
from kvstore.client.link import Link
from kvstore.client.outcomes import Counters
from kvstore.client.watcher import Watcher
from kvstore.errors import Unavailable
from kvstore.wire.messages import Commit, Committed, Done, Message

DURABLE_S = 2.0
"""More time for `durable=True`: a sync of a busy disk takes longer than an engine would ever wait for a load."""
CONNECTION_LOST = "the daemon is not connected"


class Caller:
    """Thread-safe."""

    def __init__(self, watcher: Watcher, deadline_s: float, expected_bytes_per_s: float, copy_threads: int) -> None:
        self.watcher = watcher
        self.counters = Counters()
        self.copier = Copier(copy_threads)
        self.deadline_s = deadline_s
        self._expected_bytes_per_s = expected_bytes_per_s
        self._process = os.getpid()

    @property
    def ready(self) -> bool:
        """Whether a call has a chance now: connected, the breaker closed, and not in a forked child."""
        watcher = self.watcher
        return watcher.link is not None and watcher.breaker.closed and os.getpid() == self._process

    def until(self, size_bytes: int = 0) -> float:
        """The deadline of what starts now: an answer, or fills of so many bytes."""
        return time.monotonic() + self.deadline_s + size_bytes / self._expected_bytes_per_s

    @contextmanager
    def connection(self, deadline_s: float, link: Link | None = None) -> Iterator[tuple[Link, Connection]]:
        """A connection for the body of a `with`, of `link` if given, else of the present one.

        Raises Unavailable without a wait where there is none or the breaker is open. Errors of the body go through.
        """
        watcher = self.watcher
        link = link or watcher.link
        if link is None or not watcher.breaker.closed or os.getpid() != self._process:
            raise Unavailable(CONNECTION_LOST)
        try:
            connection = link.check_out(deadline_s)
            try:
                yield link, connection
            finally:
                broken = connection.broken
                link.check_in(connection)
                if broken:
                    watcher.wake()
        except DeadlineMissed as error:
            self.counters.add("deadlines_missed")
            watcher.missed(error.waited_s)
            raise

    def ask(self, link: Link, message: Message) -> None:
        """Raises as `connection`."""
        deadline_s = self.until()
        with self.connection(deadline_s, link) as (_, connection):
            connection.call(message, Done, deadline_s)

    def commit(self, link: Link, message: Commit) -> Committed:
        """Raises as `connection`."""
        deadline_s = self.until() + (DURABLE_S if message.durable else 0.0)
        with self.connection(deadline_s, link) as (_, connection):
            return connection.call(message, Committed, deadline_s)
