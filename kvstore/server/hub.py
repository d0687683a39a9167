"""What all connections of one server share: the manager, the registry of sessions, limits, counters and the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.ledger import Ledger
from kvstore.server.limited_log import LimitedLog
from kvstore.units import KiB
from kvstore.wire.messages import MAX_IN_FLIGHT

if TYPE_CHECKING:
    from kvstore.manager import Manager
    from kvstore.server.protocol import FrameProtocol
    from kvstore.server.sessions import Registry

AdminVerb = Callable[[Mapping[str, Any]], "dict[str, Any] | Awaitable[dict[str, Any]]"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one peer can take from the others."""

    max_connections: int = 1024
    """Of the data socket, silent ones included."""
    max_admin_connections: int = 16
    handshake_s: float = 5.0
    """A connection that has not said Hello (or sent its first admin call) by then is closed."""
    slow_reader_s: float = 5.0
    """A connection that leaves its answers unread for so long, with its write buffer full, is closed."""
    write_buffer_bytes: int = 256 * KiB
    """Above this no further request of the connection is served until it has read its answers."""
    turn_s: float = 0.002
    """One connection's requests are served for so long before others get their turn."""
    max_in_flight: int = MAX_IN_FLIGHT
    gone_grace_s: float = 1.0
    """Connections still open so long after their process has exited (held by a fork of it) are closed."""


@dataclass(slots=True)
class Hub:
    """Loop thread only."""

    manager: Manager
    registry: Registry
    loop: asyncio.AbstractEventLoop
    ledger: Ledger
    log: LimitedLog
    limits: Limits
    admin_verbs: Mapping[str, AdminVerb] = field(default_factory=dict)
    """Verbs that the daemon answers itself (config, reload)."""
    data_connections: set[FrameProtocol] = field(default_factory=set)
    admin_connections: set[FrameProtocol] = field(default_factory=set)
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)
    """Strong references to what runs for admin calls; the server cancels them when it stops."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set each time a connection has ended."""

    def own(self, task: asyncio.Future[Any]) -> None:
        """Keep `task` until it ends. Its exception, if any, must be looked at by a callback of the caller's."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def handle_loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler: a bug of ours ended one callback (and its connection), nothing else."""
        error = context.get("exception")
        self.ledger.count("internal_errors_total", type(error).__name__ if error is not None else "")
        self.log.write(logging.ERROR, "internal error", "%s", context["message"], error=error)

    def report_bug(self, what: str, error: BaseException) -> None:
        """Hand an exception that a future brought to the loop's handler, where those of callbacks go."""
        self.loop.call_exception_handler({"message": what, "exception": error})

    def status(self) -> dict[str, Any]:
        """Plain JSON values: connections, sessions and their processes, slots in limbo."""
        return {
            "connections": len(self.data_connections),
            "max_connections": self.limits.max_connections,
            "sessions": self.registry.status(),
            "processes_in_limbo": self.registry.processes_in_limbo,
        }
