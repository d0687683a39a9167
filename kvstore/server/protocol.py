"""Frames in, answers out: the part of a connection that both sockets share.

Fairness: a connection is served for `turn_s`, then the others are. Bounds: a peer that does not read its answers is not
served further, and closed after `slow_reader_s`; requests that wait for something (a sync to SSD) are limited.
Errors: a KVStoreError of a verb becomes a Failed answer; a malformed frame ends the connection with one; any other
exception is a bug of ours: it ends this connection and goes to the loop's exception handler, which counts and logs it.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from kvstore.errors import Closed, Invalid, KVStoreError, Throttled
from kvstore.server.hub import Hub
from kvstore.server.peer import Peer
from kvstore.units import KiB
from kvstore.wire.frame import FrameReader, encode
from kvstore.wire.messages import MAX_FRAME_BYTES, Failed, Message

GREETING_BYTES = 4 * KiB
"""Largest frame before a peer is known: a silent half-frame holds no more memory than that."""
Answer = Message | asyncio.Future[Any] | None


class FrameProtocol(asyncio.Protocol):
    """One connection. Subclasses say what a message means (`handle`) and what ends with it (`connection_lost`)."""

    def __init__(self, hub: Hub, inside: set[FrameProtocol], raw: socket.socket, peer: Peer) -> None:
        self.hub = hub
        self._inside = inside
        self.raw = raw
        self.peer = peer
        self.pending: set[asyncio.Future[Any]] = set()
        """Answers that are being waited for."""
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)  # from connection_made on
        self._reader = FrameReader(GREETING_BYTES)
        self._frames: Iterator[tuple[int, Message]] | None = None
        """Frames that were received and wait for their turn; nothing is read from the socket meanwhile."""
        self._unread = False
        """The peer leaves its answers unread."""
        self._ended = False
        """No further request is served."""
        self._timer: asyncio.TimerHandle | None = None

    def handle(self, message: Message, request: int) -> Answer:
        """Serve one request, at once. Returns its answer, a future of it, or None where it has none.

        Raises KVStoreError, which is sent as Failed.
        """
        raise NotImplementedError

    def end(self, request: int, error: KVStoreError) -> None:
        """Say why, send what is queued, and close. Requests received but not served are dropped."""
        self.hub.ledger.count("connections_refused_total", error.code)
        peer = self.peer
        self.hub.log.write(
            logging.WARNING, error.code, "closing a connection of process %d, user %d: %s", peer.pid, peer.uid, error
        )
        self._send(request, _failed(error))
        self._ended = True
        self.transport.close()
        self._cancel_timer()  # a peer that does not read its answers does not keep the connection either
        self._timer = self.hub.loop.call_later(self.hub.limits.slow_reader_s, self.transport.abort)

    def stop_serving(self) -> None:
        """Read no further request; answers that are being waited for are still sent."""
        self._ended = True
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def cut(self) -> None:
        """Close at once, with what was not sent."""
        self._ended = True
        self.transport.abort()

    def greeted(self) -> None:
        """The peer is known: lift the handshake's bounds."""
        self._cancel_timer()
        self._reader.max_bytes = MAX_FRAME_BYTES

    def hung_up(self) -> bool:
        """The peer has closed its end, whether or not we have come to read that."""
        poll = select.poll()
        poll.register(self.raw, 0)  # POLLHUP is always reported
        return bool(poll.poll(0))

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(self.hub.limits.write_buffer_bytes)
        self._timer = self.hub.loop.call_later(self.hub.limits.handshake_s, self._too_silent)
        self._inside.add(self)

    def connection_lost(self, error: BaseException | None) -> None:
        self._ended = True
        self._frames = None
        self._cancel_timer()
        self.peer.close()
        self._inside.discard(self)
        self.hub.left.set()

    def data_received(self, data: bytes) -> None:
        assert self._frames is None, "reading is paused while frames wait for their turn"
        self._serve_frames(self._reader.feed(data))

    def pause_writing(self) -> None:
        self._unread = True
        if self._ended:
            return
        self._cancel_timer()
        self._timer = self.hub.loop.call_later(self.hub.limits.slow_reader_s, self._too_slow)
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._unread = False
        if self._ended:  # the timer is that of the end
            return
        self._cancel_timer()
        self._take_turn()

    # Serving

    def _serve_frames(self, frames: Iterator[tuple[int, Message]]) -> None:
        turn_end_s = time.monotonic() + self.hub.limits.turn_s
        sound = False
        try:
            for request, message in frames:
                self._serve(request, message)
                if self._ended:
                    break
                if self._unread or time.monotonic() >= turn_end_s:
                    self._suspend(frames)
                    break
            sound = True
        except Invalid as error:  # from the decoder: those of verbs were answered
            self.end(0, error)
            sound = True
        finally:
            if not sound:
                self.cut()

    def _serve(self, request: int, message: Message) -> None:
        try:
            if len(self.pending) >= self.hub.limits.max_in_flight and not message.ONE_WAY:
                raise Throttled(f"{len(self.pending)} requests of this connection are waiting for an answer already")
            answer = self.handle(message, request)
        except KVStoreError as error:
            self.hub.ledger.count("requests_failed_total", error.code)
            if message.ONE_WAY:
                return
            answer = _failed(error)
        if isinstance(answer, Message):
            self.transport.write(_frame(answer, request))
        elif answer is not None:
            self.pending.add(answer)
            answer.add_done_callback(partial(self._answered, request))

    def _suspend(self, frames: Iterator[tuple[int, Message]]) -> None:
        self._frames = frames
        self.transport.pause_reading()
        if not self._unread:
            self.hub.loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        if self._ended or self._unread:
            return
        frames, self._frames = self._frames, None
        if frames is not None:
            self._serve_frames(frames)
        if self._frames is None and not (self._ended or self._unread or self.transport.is_closing()):
            self.transport.resume_reading()

    def _answered(self, request: int, answer: asyncio.Future[Any]) -> None:
        self.pending.discard(answer)
        if answer.cancelled():
            self._send(request, _failed(Closed("the daemon is shutting down")))
            return
        error = answer.exception()
        if error is None:
            self._send(request, answer.result())
        elif isinstance(error, KVStoreError):
            self.hub.ledger.count("requests_failed_total", error.code)
            self._send(request, _failed(error))
        else:
            self.cut()
            self.hub.report_bug("a request failed after it was accepted", error)

    def _send(self, request: int, answer: Message) -> None:
        if not self.transport.is_closing():
            self.transport.write(_frame(answer, request))

    # Time-outs

    def _too_silent(self) -> None:
        self.end(0, Throttled(f"no request within {self.hub.limits.handshake_s:g} s of connecting"))

    def _too_slow(self) -> None:
        self.hub.ledger.count("slow_readers_total")
        self.hub.log.write(
            logging.WARNING,
            "slow reader",
            "process %d has left its answers unread for %g s: disconnected",
            self.peer.pid,
            self.hub.limits.slow_reader_s,
        )
        self.cut()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _frame(answer: Message, request: int) -> bytes:
    try:
        return encode(answer, request)
    except Invalid as error:  # too large for the peer
        return encode(Failed(error.code, f"{error}: ask for less"), request)


def _failed(error: KVStoreError) -> Failed:
    return Failed(error.code, str(error))
