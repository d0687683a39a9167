"""Sessions, the processes behind them, and the limbo of slots whose writer may still be alive.

A session lives while it has a connection; then its leases and pins end (`Manager.session_closed`). Slots that a
connection reserved are another matter: shared memory cannot refuse a late write, so when the connection ends they stay
in limbo until the process has exited (its pidfd says so) or says in a new Hello that no thread of it writes there any
more. Each connection reserves under an owner number of its own, so that "quiet" frees what ended connections reserved
and never what a living one is writing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.errors import Invalid, Throttled
from kvstore.ledger import Ledger
from kvstore.server.limited_log import LimitedLog
from kvstore.server.peer import Peer, has_exited
from kvstore.wire.messages import Hello

if TYPE_CHECKING:
    from kvstore.manager import Manager

SESSION_BYTES = 16
MAX_LABEL_CHARS = 128
MAX_LIMBO = 1024
"""Ended connections of one process that had reserved slots: a client that never says it is quiet stops there."""


@dataclass(slots=True, eq=False)
class Process:
    """A client process, in one session. Forgotten when it has neither connections nor slots in limbo."""

    key: tuple[bytes, tuple[int, int]]
    pid: int
    pidfd: int
    """-1 once the process has exited."""
    seats: set[Seat] = field(default_factory=set)
    limbo: set[int] = field(default_factory=set)
    """Owner numbers of ended connections that reserved slots."""


@dataclass(slots=True, eq=False)
class Seat:
    """One connection's place in its session."""

    session: bytes
    process: Process
    owner: int
    label: str
    abort: Callable[[], None]
    """Ends the connection."""
    hung_up: Callable[[], bool]
    """The client has closed its end, perhaps with requests still to be served."""
    reserved: bool = False
    """Set before the first Reserve: there may be slots of this owner."""
    settled: bool = False
    """The process said that it is quiet after its end was closed."""


@dataclass(slots=True)
class _Session:
    opened_s: float
    seats: set[Seat] = field(default_factory=set)


class Registry:
    """Loop thread only. `close` when no connection is left."""

    def __init__(
        self, manager: Manager, loop: asyncio.AbstractEventLoop, ledger: Ledger, log: LimitedLog, gone_grace_s: float
    ) -> None:
        self._manager = manager
        self._loop = loop
        self._ledger = ledger
        self._log = log
        self._gone_grace_s = gone_grace_s
        self._sessions: dict[bytes, _Session] = {}
        self._processes: dict[tuple[bytes, tuple[int, int]], Process] = {}
        self._owners = 0

    def attach(self, peer: Peer, hello: Hello, abort: Callable[[], None], hung_up: Callable[[], bool]) -> Seat:
        """A connection has said Hello. Takes `peer.pidfd` where the process is new.

        Raises Invalid for a malformed session or label, Throttled for a process with too many connections in limbo.
        Nothing has changed then.
        """
        _check(hello)
        key = (hello.session, peer.identity)
        process = self._processes.get(key)
        if process is not None and has_exited(process.pidfd):  # its pid was reused before the loop came to know
            self._process_gone(process)
            process = None
        if process is not None and not hello.quiet and len(process.limbo) >= MAX_LIMBO:
            raise Throttled(
                f"{MAX_LIMBO} ended connections of process {peer.pid} left reserved slots: say Hello(quiet)"
            )
        self._manager.session_opened(hello.session, hello.label)
        if process is None:
            process = self._processes[key] = Process(key, peer.pid, peer.take_pidfd())
            self._loop.add_reader(process.pidfd, self._process_gone, process)
        elif hello.quiet:
            self._leave_limbo(process, "quiet")
            for other in process.seats:  # closed by the client, but we have not come to its end yet
                other.settled = other.settled or other.hung_up()
        self._owners += 1
        seat = Seat(hello.session, process, self._owners, hello.label, abort, hung_up)
        process.seats.add(seat)
        session = self._sessions.setdefault(hello.session, _Session(time.monotonic()))
        session.seats.add(seat)
        return seat

    def detach(self, seat: Seat) -> None:
        """The connection has ended."""
        session = self._sessions[seat.session]
        session.seats.remove(seat)
        try:
            if not session.seats:
                del self._sessions[seat.session]
                self._manager.session_closed(seat.session)
        finally:  # slots come back even if that fails
            self._leave(seat)

    def _leave(self, seat: Seat) -> None:
        process = seat.process
        process.seats.remove(seat)
        exited = process.pidfd < 0
        if seat.reserved and (exited or seat.settled):
            self._free(seat.owner, "exited" if exited else "quiet")
        elif seat.reserved:
            process.limbo.add(seat.owner)
        if not exited and not process.seats and not process.limbo:
            self._forget(process)

    def status(self) -> list[dict[str, Any]]:
        """One row a session. A session's id lets its owner in: only the first bytes are shown."""
        now_s = time.monotonic()
        return [
            {
                "session": name.hex()[:8],
                "labels": sorted({seat.label for seat in session.seats if seat.label}),
                "processes": sorted({seat.process.pid for seat in session.seats}),
                "connections": len(session.seats),
                "age_s": round(now_s - session.opened_s, 3),
            }
            for name, session in self._sessions.items()
        ]

    @property
    def processes_in_limbo(self) -> int:
        return sum(1 for process in self._processes.values() if process.limbo)

    def close(self) -> None:
        """Stop watching. What is in limbo stays there: its writers may outlive this daemon. Idempotent."""
        for process in list(self._processes.values()):
            self._forget(process)

    def _process_gone(self, process: Process) -> None:
        """The process has exited: nobody writes into what it reserved."""
        self._forget(process)
        self._leave_limbo(process, "exited")
        if process.seats:  # their sockets say so too, in a moment, unless a fork of the process holds them open
            self._loop.call_later(self._gone_grace_s, self._abort_seats, process)

    def _abort_seats(self, process: Process) -> None:
        for seat in list(process.seats):
            self._log.write(
                logging.WARNING, "forked", "process %d has exited but its connection is open: closed", process.pid
            )
            seat.abort()

    def _leave_limbo(self, process: Process, why: str) -> None:
        while process.limbo:
            self._free(process.limbo.pop(), why)

    def _free(self, owner: int, why: str) -> None:
        self._ledger.count("limbo_owners_freed_total", why)
        self._manager.owner_gone(owner)

    def _forget(self, process: Process) -> None:
        del self._processes[process.key]
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        process.pidfd = -1


def _check(hello: Hello) -> None:
    if len(hello.session) != SESSION_BYTES:
        raise Invalid(f"a session is {SESSION_BYTES} bytes, not {len(hello.session)}")
    if len(hello.label) > MAX_LABEL_CHARS or not hello.label.isprintable():
        raise Invalid(f"a label is at most {MAX_LABEL_CHARS} printable characters")
