"""One blocking connection to the daemon: requests out, answers in, matched by request id; never a wait past a deadline.

A request that missed its deadline is abandoned, not forgotten: its bytes go on being sent (a frame is never cut short),
and when its answer comes after all, what the daemon granted by it is given back. So a frozen daemon that goes on leaves
no lease, pin or reservation behind, and the connection stays usable.
Not thread-safe: one thread at a time (link.py hands connections out); `interrupt` may be called by any thread.
"""

from __future__ import annotations

import os
import select
import socket
import time
from math import ceil
from pathlib import Path
from typing import TypeVar

from kvstore.errors import Invalid, Unavailable, from_code
from kvstore.wire.frame import FrameReader, encode
from kvstore.wire.messages import (
    MAX_FRAME_BYTES,
    Abort,
    Failed,
    Hello,
    Lease,
    Leased,
    Message,
    Pin,
    Release,
    Reserved,
    Unpin,
    Welcome,
)

SPIN_S = 50e-6
"""Look at the socket for so long before sleeping, which costs about as much. Without a yield: that gives the processor
away for a whole slice when others want it (measured with 8 copying clients: look-up p50 9.4 ms, without it 0.5 ms)."""
MAX_OUTGOING_BYTES = 4 * MAX_FRAME_BYTES
"""Unsent bytes to a daemon that reads nothing; above it the connection is given up."""
_BUFFER_BYTES = 128 << 10

Answer = TypeVar("Answer", bound=Message)


class DeadlineMissed(Unavailable):
    """The daemon did not answer in time. `waited_s` says how long it was given."""

    def __init__(self, what: str, waited_s: float) -> None:
        super().__init__(f"no answer to {what} within {waited_s * 1e3:.1f} ms")
        self.waited_s = waited_s


class Connection:
    """`broken` is final: the daemon is gone, or it sent what makes no sense."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes ownership of a connected socket."""
        sock.setblocking(False)
        self._socket = sock
        self._reader = FrameReader()
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)
        self._outgoing = bytearray()
        self._next_request = 1
        self._pending: dict[int, type[Message]] = {}
        self._answers: dict[int, Message] = {}
        self._abandoned: dict[int, type[Message]] = {}
        self.broken = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def owes(self) -> bool:
        """Whether there is something to do even if nobody calls: late answers to come, or bytes still to send."""
        return bool(self._abandoned or self._outgoing) and not self.broken

    def call(self, message: Message, kind: type[Answer], deadline_s: float) -> Answer:
        """Send and wait. Raises DeadlineMissed, Unavailable (the connection ended), or what the daemon answered."""
        return self.finish(self.start(message), kind, deadline_s)

    def start(self, message: Message) -> int:
        """Send a request without waiting; `finish` or `abandon` must follow. Raises Unavailable, Invalid (size).

        What the socket does not take now is sent while waiting for answers.
        """
        request = self._next_request
        frame = encode(message, request)
        self._next_request = request % 0xFFFFFFFF + 1
        self._pending[request] = type(message)
        self._send(frame)
        return request

    def post(self, message: Message) -> None:
        """Send a one-way message without waiting. Raises Unavailable."""
        self._send(encode(message, 0))

    def finish(self, request: int, kind: type[Answer], deadline_s: float) -> Answer:
        """Wait for one answer until time.monotonic() reaches `deadline_s`; at least one look is taken.

        Raises DeadlineMissed (the request is then abandoned), Unavailable, or the error that the daemon answered.
        """
        start_s = time.monotonic()
        while (answer := self._answers.pop(request, None)) is None:
            if not self._read(start_s + SPIN_S, deadline_s):
                what = self._pending[request].__name__
                self.abandon(request)
                raise DeadlineMissed(what, time.monotonic() - start_s)
        del self._pending[request]
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, Failed):
            raise from_code(answer.code, answer.message)
        self.broken = True
        raise Unavailable(f"the daemon answered {type(answer).__name__} instead of {kind.__name__}")

    def abandon(self, request: int) -> None:
        """Nobody waits for this answer any more: what it grants is given back when it comes."""
        kind = self._pending.pop(request, None)
        if kind is not None:
            self._abandoned[request] = kind
            self._deliver(request, self._answers.pop(request, None))

    def abandon_all(self) -> None:
        for request in list(self._pending):
            self.abandon(request)

    def answered(self, request: int) -> bool:
        """One look, no waiting. Raises Unavailable."""
        if request not in self._answers:
            self.drain()
        return request in self._answers

    def drain(self) -> None:
        """Send and take in what can be without waiting. Raises Unavailable."""
        while self._read(0.0, 0.0):
            pass

    def receive_descriptors(self, deadline_s: float) -> list[int]:
        """For the very first bytes of a connection, which carry the arena's descriptors. The caller owns them."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 2, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                self._wait(deadline_s, "Hello")
                continue
            except OSError as error:
                raise self._lost(error) from error
            try:
                self._take(data)
            except Unavailable:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise
            return list(descriptors)

    def interrupt(self) -> None:
        """Any thread: end the connection under whoever waits on it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it had ended by itself

    def close(self) -> None:
        self.broken = True
        self._socket.close()

    def _send(self, frame: bytes) -> None:
        if self._outgoing:
            if len(self._outgoing) > MAX_OUTGOING_BYTES:
                self.broken = True
                raise Unavailable("the daemon reads nothing")
            self._outgoing += frame
            self._flush()
            return
        try:
            sent = self._socket.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._lost(error) from error
        if sent < len(frame):
            self._outgoing += frame[sent:]

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(error) from error

    def _read(self, spin_until_s: float, deadline_s: float) -> bool:
        """Take in what has come. False when the deadline passed and a last look found nothing."""
        while True:
            if self._outgoing:
                self._flush()
            try:
                size = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                now_s = time.monotonic()
                if now_s >= deadline_s:
                    return False
                if now_s >= spin_until_s:
                    self._sleep(deadline_s - now_s)
                continue
            except OSError as error:
                raise self._lost(error) from error
            self._take(self._buffer[:size])
            return True

    def _wait(self, deadline_s: float, what: str) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineMissed(what, 0.0)
        self._sleep(left_s)

    def _sleep(self, timeout_s: float) -> None:
        events = select.POLLIN | select.POLLOUT if self._outgoing else select.POLLIN
        self._poll.modify(self._socket.fileno(), events)
        self._poll.poll(ceil(timeout_s * 1e3))

    def _take(self, data: bytes | memoryview) -> None:
        if not data:
            self.broken = True
            raise Unavailable("the daemon closed the connection")
        try:
            for request, message in self._reader.feed(data):
                self._deliver(request, message)
        except Invalid as error:
            self.broken = True
            raise Unavailable(f"the daemon sent what makes no sense: {error}") from error

    def _deliver(self, request: int, message: Message | None) -> None:
        if message is None:
            return
        if request in self._pending:
            self._answers[request] = message
            return
        kind = self._abandoned.pop(request, None)
        if kind is Lease and isinstance(message, Leased) and message.lease:
            self.post(Release(message.lease))
        elif kind is Pin and isinstance(message, Leased) and message.lease:
            self.abandon(self.start(Unpin(message.lease)))
        elif isinstance(message, Reserved) and message.reservation:
            self.post(Abort(message.reservation))

    def _lost(self, error: OSError) -> Unavailable:
        self.broken = True
        return Unavailable(f"the connection to the daemon ended: {error.strerror or error}")


def connect(path: Path, hello: Hello, deadline_s: float) -> tuple[Connection, Welcome, list[int]]:
    """Connect and shake hands. The caller owns the connection and the descriptors (two, or none if not wanted).

    Raises Unavailable (nobody listens), DeadlineMissed, or what the daemon answered to the Hello.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(sock)
    descriptors: list[int] = []
    try:
        try:
            sock.connect(str(path))
        except OSError as error:
            raise Unavailable(f"no daemon answers at {path}: {error.strerror or error}") from error
        request = connection.start(hello)
        if hello.want_fds:
            descriptors = connection.receive_descriptors(deadline_s)
        welcome = connection.finish(request, Welcome, deadline_s)
        if len(descriptors) != (2 if hello.want_fds else 0):
            raise Unavailable(f"the daemon sent {len(descriptors)} descriptors with its welcome")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        connection.close()
        raise
    return connection, welcome, descriptors
