"""The background thread of a client: connects, notices that the daemon is gone, probes, and drops old mappings.

It never calls into the engine and never holds an engine thread up. It sleeps in one poll over a monitor connection (its
end is how a killed daemon is noticed at once) and an eventfd by which other threads wake it.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore.arena import ArenaMapping
from kvstore.client.breaker import Breaker
from kvstore.client.connection import Connection, connect
from kvstore.client.link import Link
from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.wire.messages import PROTOCOL, PROTOCOL_MIN, Done, Hello, Ping, Welcome

CONNECT_S = 0.5
"""For one attempt, hand-shake included."""
BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.25, 0.5)
"""Pauses between attempts; the last one repeats."""
TICK_S = 0.5
"""Longest sleep: what dropped objects owe, and late answers, are seen to at least so often."""
DEBT_TICK_S = 0.05
_log = logging.getLogger("kvstore.client")


class Watcher:
    """Owns the link and the breaker. All public methods are for any thread and return at once, except where said."""

    def __init__(self, path: Path, session: bytes, label: str, deadline_s: float, *, sole_user: bool) -> None:
        """`sole_user`: no other client of this process has this session, so this one may say that it is quiet."""
        self.link: Link | None = None
        self.breaker = Breaker()
        self.last_error = "not connected yet"
        self.connects_total = 0
        self._path = path
        self._session = session
        self._label = label
        self._deadline_s = deadline_s
        self._sole_user = sole_user
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._attempts = 0
        self._stopping = False
        self._monitor: Connection | None = None
        self._probe: int | None = None
        self._probe_sent_s = 0.0
        self._suspected = False
        self._dead_links: list[Link] = []
        self._prefault: threading.Thread | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvstore-client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_first_attempt(self, timeout_s: float) -> None:
        """Waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._attempts > 0, timeout_s)

    def wait_connected(self, timeout_s: float) -> bool:
        """Waits."""
        with self._changed:
            return self._changed.wait_for(lambda: self.link is not None, timeout_s)

    def missed(self, waited_s: float) -> None:
        """A call had no answer. After a fair time the breaker opens; after a shorter one a probe finds out."""
        if waited_s < 0.8 * self._deadline_s:
            self.suspect()
            return
        with self._lock:
            opened = self.breaker.fail(time.monotonic())
        if opened:
            _log.warning("the daemon did not answer within %.0f ms: every call is a miss until it does", waited_s * 1e3)
            self.wake()

    def suspect(self) -> None:
        """Something took too long, perhaps because the daemon is frozen: ask it."""
        self._suspected = True
        self.wake()

    def wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Waits for the thread (at most CONNECT_S, where it is just shaking hands). Idempotent."""
        self._stopping = True
        self.wake()
        self._thread.join()
        with self._lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def close_inherited(self) -> None:
        """In a forked child, whose only thread this is: let go of the parent's sockets."""
        for link in [self.link, *self._dead_links]:
            if link is not None:
                link.close_inherited()
        if self._monitor is not None:
            self._monitor.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self.link is None:
                    self._attempt()
                else:
                    self._watch(self.link, self._pause_s(self.link))
        finally:
            self._drop("the client was closed")

    # -- connecting

    def _attempt(self) -> None:
        error: KVStoreError | OSError | None = None
        try:
            link, self._monitor = self._connect()
        except (KVStoreError, OSError) as caught:
            error = caught
        with self._changed:
            self._attempts += 1
            if error is None:
                self.connects_total += 1
                self.last_error = ""
                self._dead_links = [old for old in self._dead_links if old.writing]
                with self._lock:
                    self.breaker.reset()
                self.link = link
            else:
                self.last_error = str(error)
            self._changed.notify_all()
        if error is None:
            _log.info("connected to the daemon at %s", self._path)
            self._prefault = threading.Thread(
                target=_prefault, args=(link.mapping,), name="kvstore-prefault", daemon=True
            )
            self._prefault.start()
            self._attempts = 1
        elif not self._stopping:
            self._sleep(BACKOFF_S[min(self._attempts, len(BACKOFF_S)) - 1])

    def _connect(self) -> tuple[Link, Connection]:
        deadline_s = time.monotonic() + CONNECT_S
        monitor, welcome, descriptors = connect(self._path, self._hello(first=True), deadline_s)
        try:
            mapping = ArenaMapping(
                descriptors[0], descriptors[1], welcome.arena_bytes, welcome.control_bytes, welcome.arena_id
            )
        except BaseException:
            monitor.close()
            raise
        return Link(welcome, mapping, self._opener(welcome)), monitor

    def _opener(self, first: Welcome) -> Callable[[float], Connection]:
        def open_connection(deadline_s: float) -> Connection:
            connection, welcome, _ = connect(self._path, self._hello(first=False), deadline_s)
            if welcome.arena_id != first.arena_id:  # another daemon has taken the place: its offsets are not ours
                connection.close()
                self.suspect()
                raise Unavailable("the daemon was replaced")
            return connection

        return open_connection

    def _hello(self, *, first: bool) -> Hello:
        """Only the first of a link may say that this process is quiet: there is no live link then, so nobody can be
        writing over a connection that has broken without being noticed yet."""
        quiet = first and self._sole_user and not any(link.writing for link in self._dead_links)
        return Hello(PROTOCOL_MIN, PROTOCOL, self._session, self._label, first, quiet)

    def _drop(self, reason: str) -> None:
        """The link has ended: everybody on it is told, its mapping goes when the last view of it does."""
        link, self.link = self.link, None
        monitor, self._monitor = self._monitor, None
        self._probe = None
        if monitor is not None:
            monitor.close()
        if link is None:
            return
        link.die(reason)
        link.mapping.close()
        self._dead_links.append(link)
        if self._prefault is not None:
            self._prefault.join()
            self._prefault = None
        if not self._stopping:
            self.last_error = link.reason
            _log.warning("disconnected: %s", link.reason)

    # -- watching

    def _watch(self, link: Link, pause_s: float) -> None:
        monitor = self._monitor
        assert monitor is not None
        self._sleep(pause_s, monitor.fileno())
        try:
            monitor.drain()
            if link.dead:
                raise Unavailable(link.reason)
            self._tend_probe(monitor)
            while link.owed:
                monitor.post(link.owed.popleft())
        except Unavailable as error:
            self._drop(str(error))
            return
        for connection in link.idle_debtors():
            with suppress(Unavailable):
                connection.drain()
            link.check_in(connection)

    def _tend_probe(self, monitor: Connection) -> None:
        """At most one probe is under way, so a daemon that is frozen for days finds one when it goes on."""
        now_s = time.monotonic()
        if self._probe is not None:
            if monitor.answered(self._probe):
                with suppress(KVStoreError):  # any answer will do, also that it is draining
                    monitor.finish(self._probe, Done, 0.0)
                self._probe = None
                with self._lock:
                    closed = self.breaker.succeed(now_s)
                if closed:
                    _log.info("the daemon answers again")
            elif now_s - self._probe_sent_s > self._deadline_s:
                with self._lock:
                    self.breaker.fail(now_s)
                    self.breaker.probe_sent()
            return
        with self._lock:
            due = self.breaker.probe_in_s(now_s) == 0.0
            if due:
                self.breaker.probe_sent()
        if due or self._suspected:
            self._suspected = False
            self._probe = monitor.start(Ping())
            self._probe_sent_s = now_s

    def _pause_s(self, link: Link) -> float:
        now_s = time.monotonic()
        pauses_s = [TICK_S]
        probe_in_s = self.breaker.probe_in_s(now_s)
        if self._probe is not None and self.breaker.closed:
            pauses_s.append(max(0.0, self._probe_sent_s + self._deadline_s - now_s) + 1e-3)
        elif self._probe is None and probe_in_s is not None:
            pauses_s.append(probe_in_s)
        if link.owes and self.breaker.closed:
            pauses_s.append(DEBT_TICK_S)
        return min(pauses_s)

    def _sleep(self, pause_s: float, monitor_fd: int | None = None) -> None:
        """Until woken, at most `pause_s`."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if monitor_fd is not None:
            poll.register(monitor_fd, select.POLLIN)
        poll.poll(pause_s * 1e3)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)


def _prefault(mapping: ArenaMapping) -> None:
    with suppress(Closed):  # dropped before this thread ran
        mapping.prefault()
