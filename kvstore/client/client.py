"""The public face: one object an engine process, from which roots are made."""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.client.caller import Caller
from kvstore.client.root import Root
from kvstore.client.watcher import Watcher
from kvstore.config import default_socket_path
from kvstore.errors import Invalid, KVStoreError
from kvstore.layout import slot_layout
from kvstore.namespace import BaseNamespace, RequestIdentity, check_identity, check_namespace, root_digest
from kvstore.wire.frame import encode
from kvstore.wire.messages import Done, OpenRoot, Ping, Stats, StatsAnswer

DEADLINE_S = 0.05
EXPECTED_BYTES_PER_S = 1e9
MAX_ROOTS = 1024
"""Kept for re-use; engines make a root a request where salts or adapters differ."""
SESSION_BYTES = 16

_clients: weakref.WeakSet[Client] = weakref.WeakSet()
"""A global, because fork handlers cannot be taken back: a forked child must let go of its copies of the sockets."""


class Client:
    """A connection to the daemon of this node, for engines: it can only miss, it never raises and never hangs.

    Thread-safe; calls of several threads use connections of their own. Where there is no daemon (yet, or any more)
    everything is a miss, and a background thread connects as soon as there is one. After a fork the child's calls are
    misses: make a new client there. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        socket_path: str | Path | None = None,
        *,
        label: str = "",
        session: bytes | None = None,
        deadline_s: float = DEADLINE_S,
        expected_bytes_per_s: float = EXPECTED_BYTES_PER_S,
        copy_threads: int = 1,
    ) -> None:
        """Waits for the first attempt to connect, at most `deadline_s`; never raises because of the daemon.

        socket_path: None means the default place (`kvstore.config.default_socket_path`).
        label: shown by `kvstore status`; say which engine and rank.
        session: 16 bytes shared by all processes of one engine (leases and pins are the session's); None: of its own.
        deadline_s: the longest wait for an answer of the daemon; a missed one opens the breaker. What is being read
            from SSD is waited for so long plus its bytes over `expected_bytes_per_s`.
        copy_threads: threads that copy one large batch together.
        Raises Invalid for settings that can never work.
        """
        if session is not None and len(session) != SESSION_BYTES:
            raise Invalid(f"a session is {SESSION_BYTES} bytes, not {len(session)}")
        if deadline_s <= 0 or expected_bytes_per_s <= 0 or copy_threads < 1:
            raise Invalid("deadline_s, expected_bytes_per_s and copy_threads must be positive")
        self.path = Path(socket_path) if socket_path is not None else default_socket_path()
        self.session = session or secrets.token_bytes(SESSION_BYTES)
        self._watcher = Watcher(self.path, self.session, label, deadline_s, sole_user=session is None)
        self._caller = Caller(self._watcher, deadline_s, expected_bytes_per_s, copy_threads)
        self._lock = threading.Lock()
        self._roots: OrderedDict[tuple[int, RequestIdentity, str | None], tuple[BaseNamespace, Root]] = OrderedDict()
        self._closed = False
        self._process = os.getpid()
        _clients.add(self)
        self._watcher.start()
        self._watcher.wait_first_attempt(deadline_s)

    @property
    def connected(self) -> bool:
        return self._watcher.link is not None

    @property
    def breaker_state(self) -> str:
        """`closed` (calls go through), `open` or `half-open` (calls are misses until a probe is answered)."""
        return self._watcher.breaker.state.value

    @property
    def last_error(self) -> str:
        """Why it is not connected, or why the daemon refuses a namespace, in one sentence; empty where all is well."""
        return self._watcher.last_error

    def wait_connected(self, timeout_s: float) -> bool:
        """For tools, which can wait. Returns whether it is connected."""
        return self._watcher.wait_connected(timeout_s)

    def root(self, namespace: BaseNamespace, identity: RequestIdentity | None = None, pool: str | None = None) -> Root:
        """The verbs on one pool (None: the first) of one identity. Sends nothing; the same arguments give the same one.

        Raises Invalid where namespace, identity or pool name can never work: a mistake of the caller.
        """
        identity = identity or RequestIdentity()
        name = (id(namespace), identity, pool)
        with self._lock:
            known = self._roots.get(name)
            if known is not None:
                self._roots.move_to_end(name)
                return known[1]
        root = self._make_root(namespace, identity, pool)
        with self._lock:
            self._roots[name] = namespace, root  # keeps the namespace alive, so that its id stays its own
            if len(self._roots) > MAX_ROOTS:
                self._roots.popitem(last=False)
        return root

    def ping(self) -> float | None:
        """Seconds of one round trip, or None where the daemon did not answer in time."""
        deadline_s = self._caller.until()
        start_s = time.perf_counter()
        try:
            with self._caller.connection(deadline_s) as (_, connection):
                connection.call(Ping(), Done, deadline_s)
        except KVStoreError:
            return None
        return time.perf_counter() - start_s

    def stats(self) -> dict[str, Any]:
        """`client`: counters of this object, by code; `daemon`: those of the daemon, None where it did not answer."""
        watcher = self._watcher
        own = {
            "connected": self.connected,
            "breaker": self.breaker_state,
            "breaker_opened_total": watcher.breaker.opened_total,
            "connects_total": watcher.connects_total,
            "last_error": self.last_error,
            **self._caller.counters.snapshot(),
        }
        daemon: dict[str, Any] | None = None
        deadline_s = self._caller.until()
        try:
            with self._caller.connection(deadline_s) as (_, connection):
                daemon = connection.call(Stats(), StatsAnswer, deadline_s).stats
        except KVStoreError:
            daemon = None
        return {"client": own, "daemon": daemon}

    def close(self) -> None:
        """End the session: its leases and pins end, calls of other threads return misses. Idempotent.

        Waits for the background thread (at most half a second). Views that are still held stay readable memory.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._watcher.close()
        self._caller.copier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_root(self, namespace: BaseNamespace, identity: RequestIdentity, pool: str | None) -> Root:
        check_namespace(namespace)
        check_identity(identity)
        names = [spec.name for spec in namespace.pools]
        if pool is not None and pool not in names:
            raise Invalid(f"no pool {pool!r} in this namespace; it has {', '.join(map(repr, names))}")
        number = names.index(pool) if pool is not None else 0
        encode(OpenRoot(namespace, identity), 0)  # raises Invalid where the part tables do not fit into a frame
        layout = slot_layout(namespace.pools[number])
        return Root(self._caller, namespace, identity, number, layout, root_digest(namespace, identity))

    def _close_inherited(self) -> None:
        self._watcher.close_inherited()


def _after_fork() -> None:
    for client in list(_clients):
        client._close_inherited()


os.register_at_fork(after_in_child=_after_fork)
