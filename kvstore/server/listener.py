"""The server: accepts on both sockets, holds the number of connections down, drains when it stops."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.clock import MonotonicClock
from kvstore.errors import Denied, KVStoreError, Throttled, Unavailable
from kvstore.ledger import Ledger
from kvstore.server.admin import AdminConnection
from kvstore.server.connection import Connection
from kvstore.server.hub import AdminVerb, Hub, Limits
from kvstore.server.limited_log import LimitedLog
from kvstore.server.peer import identify
from kvstore.server.protocol import FrameProtocol
from kvstore.server.sessions import Registry
from kvstore.server.socket_file import SocketFile
from kvstore.wire.frame import encode
from kvstore.wire.messages import Failed

if TYPE_CHECKING:
    from kvstore.manager import Manager

ADMIN_MODE = 0o600
ACCEPTS_A_TURN = 16
ACCEPT_PAUSE_S = 0.1
"""Rest when descriptors or memory have run out: the backlog waits, the loop does not spin."""
FLUSH_S = 0.5
"""What a stopping server leaves its clients to take their last answers."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server:
    """Data and admin socket of one daemon. Loop thread only.

    `mode` and `group` are the data socket's; the admin socket is for the daemon's user. `admin_verbs` are answered by
    the daemon instead of the manager. `start` takes the loop's exception handler over (the earlier one is put back by
    `stop`): an exception that reaches it is counted as `internal_errors_total` and logged with its traceback.
    """

    def __init__(
        self,
        manager: Manager,
        socket_path: Path,
        admin_path: Path,
        *,
        mode: int = 0o660,
        group: str | None = None,
        max_connections: int = 1024,
        ledger: Ledger,
        admin_verbs: Mapping[str, AdminVerb] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._manager = manager
        self._socket_path = socket_path
        self._admin_path = admin_path
        self._mode = mode
        self._group = group
        self._ledger = ledger
        self._admin_verbs = dict(admin_verbs or {})
        self._limits = limits or Limits(max_connections=max_connections)
        self._hub: Hub | None = None
        self._doors: list[_Door] = []
        self._former_handler: Callable[[asyncio.AbstractEventLoop, dict[str, object]], object] | None = None

    @property
    def connections(self) -> frozenset[FrameProtocol]:
        """Of the data socket, as they are now."""
        return frozenset(self._hub.data_connections if self._hub else ())

    @property
    def admin_connections(self) -> frozenset[FrameProtocol]:
        return frozenset(self._hub.admin_connections if self._hub else ())

    async def start(self) -> None:
        """Listen. Raises as SocketFile.claim; then nothing is left behind."""
        loop = asyncio.get_running_loop()
        log = LimitedLog(logging.getLogger("kvstore.server"), MonotonicClock())
        registry = Registry(self._manager, loop, self._ledger, log, self._limits.gone_grace_s)
        hub = Hub(self._manager, registry, loop, self._ledger, log, self._limits, self._admin_verbs)
        limits = self._limits
        data = SocketFile.claim(self._socket_path, self._mode, self._group, limits.max_connections)
        try:
            admin = SocketFile.claim(self._admin_path, ADMIN_MODE, None, limits.max_admin_connections)
        except KVStoreError:
            data.close()
            raise
        self._hub = hub
        self._former_handler = loop.get_exception_handler()
        loop.set_exception_handler(hub.handle_loop_exception)
        self._doors = [
            _Door(hub, data, Connection, hub.data_connections, limits.max_connections),
            _Door(hub, admin, AdminConnection, hub.admin_connections, limits.max_admin_connections),
        ]

    async def stop(self, drain_s: float) -> int:
        """Refuse newcomers and new requests at once; wait up to `drain_s` for answers that are being waited for.

        Returns how many requests were cut off. Idempotent. When cancelled, connections may be left open: call again.
        """
        hub, loop = self._hub, asyncio.get_running_loop()
        if hub is None:
            return 0
        for door in self._doors:
            await door.close()
        connections = [*hub.data_connections, *hub.admin_connections]
        for connection in connections:
            connection.stop_serving()
        waiting = {future for connection in connections for future in connection.pending}
        cut = 0
        if waiting:
            _, unfinished = await asyncio.wait(waiting, timeout=drain_s)
            cut = len(unfinished)
            await asyncio.sleep(0)  # their answers are written by callbacks
        for task in list(hub.tasks):
            task.cancel()
        for connection in connections:
            connection.transport.close()
        await _until_empty(hub, FLUSH_S)
        for connection in (*hub.data_connections, *hub.admin_connections):
            connection.transport.abort()
        await _until_empty(hub, FLUSH_S)
        hub.registry.close()
        loop.set_exception_handler(self._former_handler)
        self._hub = None
        return cut


class _Door:
    """One listening socket. A connection counts from its accept on, so that silent ones are bounded too."""

    def __init__(
        self,
        hub: Hub,
        file: SocketFile,
        kind: Callable[..., FrameProtocol],
        inside: set[FrameProtocol],
        most: int,
    ) -> None:
        self._hub = hub
        self._file = file
        self._kind = kind
        self._inside = inside
        self._most = most
        self._entering: set[asyncio.Task[object]] = set()
        self._open = True
        self._listen()

    async def close(self) -> None:
        """Let nobody in any more; whoever was accepted is inside on return. Idempotent."""
        if self._open:
            self._open = False
            self._hub.loop.remove_reader(self._file.listener)
            self._file.close()
        if self._entering:
            await asyncio.wait(self._entering)

    def _listen(self) -> None:
        if self._open:
            self._hub.loop.add_reader(self._file.listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                raw, _address = self._file.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._hub.ledger.count("accept_failures_total", errno.errorcode[error.errno])
                self._hub.log.write(logging.ERROR, "accept", "cannot accept connections: %s", error.strerror)
                self._hub.loop.remove_reader(self._file.listener)
                self._hub.loop.call_later(ACCEPT_PAUSE_S, self._listen)
                return
            self._admit(raw)

    def _admit(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        try:
            if len(self._inside) + len(self._entering) >= self._most:
                raise Throttled(
                    f"{self._most} connections are open already: close some or raise socket.max_connections"
                )
            peer = identify(raw)
        except (Throttled, Unavailable, Denied) as error:
            self._turn_away(raw, error)
            return
        except OSError as error:  # no descriptor left for the pidfd
            self._turn_away(raw, Throttled(f"no descriptor left for another connection: {error.strerror}"))
            return
        make = partial(self._kind, self._hub, self._inside, raw, peer)
        task = self._hub.loop.create_task(_enter(self._hub.loop, make, raw))
        self._entering.add(task)
        task.add_done_callback(self._entered)

    def _entered(self, task: asyncio.Task[object]) -> None:
        self._entering.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._hub.report_bug("a connection could not be set up", error)

    def _turn_away(self, raw: socket.socket, error: KVStoreError) -> None:
        self._hub.ledger.count("connections_refused_total", error.code)
        self._hub.log.write(logging.WARNING, "turned away", "connection refused: %s", error)
        with raw:
            try:
                raw.send(encode(Failed(error.code, str(error)), 0))
            except OSError:  # it has gone; the log says what it would have been told
                return


async def _enter(loop: asyncio.AbstractEventLoop, make: Callable[[], FrameProtocol], raw: socket.socket) -> None:
    await loop.connect_accepted_socket(make, raw)


async def _until_empty(hub: Hub, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while hub.data_connections or hub.admin_connections:
                hub.left.clear()
                await hub.left.wait()
    except TimeoutError:
        return
