"""One connection of the data socket: the handshake, then one line a verb."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from typing import Any, ClassVar

from kvstore import __version__
from kvstore.errors import Denied, Invalid, KVStoreError
from kvstore.keys import KEY_BYTES
from kvstore.server.hub import Hub
from kvstore.server.peer import Peer
from kvstore.server.protocol import Answer, FrameProtocol
from kvstore.server.sessions import Seat
from kvstore.wire import messages as m
from kvstore.wire.frame import encode

MAX_KEYS_BYTES = m.MAX_KEYS * KEY_BYTES


class Connection(FrameProtocol):
    def __init__(self, hub: Hub, inside: set[FrameProtocol], raw: socket.socket, peer: Peer) -> None:
        super().__init__(hub, inside, raw, peer)
        self._manager = hub.manager
        self._session = b""
        self._seat: Seat | None = None

    def connection_lost(self, error: BaseException | None) -> None:
        super().connection_lost(error)
        seat, self._seat = self._seat, None
        if seat is not None:
            self.hub.registry.detach(seat)

    def handle(self, message: m.Message, request: int) -> Answer:
        if self._seat is not None:
            verb = self._VERBS.get(type(message))
            if verb is not None:
                self.hub.ledger.count("requests_total", type(message).__name__)
                return verb(self, message)
        elif isinstance(message, m.Hello):
            self._hello(message, request)
            return None
        self._refuse(message, request)
        return None

    def _refuse(self, message: m.Message, request: int) -> None:
        if isinstance(message, m.AdminCall):
            error: KVStoreError = Denied(f"`{message.verb:.40}` is an admin verb: use the admin socket")
        elif self._seat is None:
            error = Invalid(f"the first frame must be Hello, not {type(message).__name__}")
        else:
            error = Invalid(f"{type(message).__name__} is not a request of a greeted client")
        self.end(request, error)

    # Handshake

    def _hello(self, hello: m.Hello, request: int) -> None:
        try:
            protocol = _agree(hello)
            self._seat = self.hub.registry.attach(self.peer, hello, self.cut, self.hung_up)
        except KVStoreError as error:
            self.end(request, error)
            return
        self._session = hello.session
        welcome = m.Welcome(
            **{
                **self._manager.welcome(),
                "protocol": protocol,
                "max_in_flight": self.hub.limits.max_in_flight,
                "version": __version__,
            }
        )
        self.greeted()
        self.hub.log.write(
            logging.INFO,
            "connected",
            "session %s: connection of %r, process %d, user %d, group %d, protocol %d",
            hello.session.hex()[:8],
            hello.label,
            self.peer.pid,
            self.peer.uid,
            self.peer.gid,
            protocol,
        )
        if hello.want_fds:
            self._send_with_fds(encode(welcome, request))
        else:
            self.transport.write(encode(welcome, request))

    def _send_with_fds(self, frame: bytes) -> None:
        """Past the transport, which cannot send descriptors: nothing has been written to it yet, so order is kept."""
        arena = self._manager.arena
        try:
            sent = socket.send_fds(self.raw, [frame], [arena.fd, arena.control_fd])
        except OSError as error:  # gone meanwhile, or it leaves too many descriptors unread (ETOOMANYREFS)
            self.hub.log.write(
                logging.WARNING, "no fds", "cannot send the arena to process %d: %s", self.peer.pid, error
            )
            sent = -1
        if sent != len(frame):
            self.cut()

    # Verbs

    def _ping(self, message: m.Ping) -> Answer:
        return _DONE

    def _open_root(self, message: m.OpenRoot) -> Answer:
        return self._manager.open_root(self._session, message.namespace, message.identity)

    def _lookup(self, message: m.Lookup) -> Answer:
        _check_keys(message.keys)
        return self._manager.lookup(self._session, message.root, message.pool, message.keys)

    def _lease(self, message: m.Lease) -> Answer:
        _check_keys(message.keys)
        return self._manager.lease(self._session, message.root, message.pool, message.keys, message.layerwise)

    def _release(self, message: m.Release) -> Answer:
        if message.copied_bytes < 0 or not 0 <= message.seconds < math.inf:
            raise Invalid("a release reports bytes and seconds that are at least 0")
        self._manager.release(self._session, message.lease, message.copied_bytes, message.seconds)
        return None

    def _renew(self, message: m.Renew) -> Answer:
        self._manager.renew(self._session, message.lease)
        return _DONE

    def _reserve(self, message: m.Reserve) -> Answer:
        _check_keys(message.keys)
        if len(message.parents) != len(message.keys):
            raise Invalid(f"{len(message.keys)} bytes of keys need as many of parents, not {len(message.parents)}")
        seat = self._seat
        assert seat is not None
        seat.reserved = True
        return self._manager.reserve(
            self._session,
            seat.owner,
            message.root,
            message.pool,
            message.shard,
            message.keys,
            message.parents,
            message.durable,
        )

    def _commit(self, message: m.Commit) -> Answer:
        return self._manager.commit(
            self._session, message.reservation, message.first, message.count, message.durable, message.hold
        )

    def _abort(self, message: m.Abort) -> Answer:
        self._manager.abort(self._session, message.reservation)
        return None

    def _pin(self, message: m.Pin) -> Answer:
        _check_keys(message.keys)
        if not 0 < message.ttl_s < math.inf:
            raise Invalid(f"a pin lasts more than 0 and finitely many seconds, not {message.ttl_s}")
        return self._manager.pin(self._session, message.root, message.pool, message.keys, message.ttl_s)

    def _unpin(self, message: m.Unpin) -> Answer:
        self._manager.unpin(self._session, message.lease)
        return _DONE

    def _stats(self, message: m.Stats) -> Answer:
        return m.StatsAnswer(self._manager.stats())

    _VERBS: ClassVar[dict[type[m.Message], Callable[[Connection, Any], Answer]]] = {
        m.Ping: _ping,
        m.OpenRoot: _open_root,
        m.Lookup: _lookup,
        m.Lease: _lease,
        m.Release: _release,
        m.Renew: _renew,
        m.Reserve: _reserve,
        m.Commit: _commit,
        m.Abort: _abort,
        m.Pin: _pin,
        m.Unpin: _unpin,
        m.Stats: _stats,
    }


_DONE = m.Done()


def _agree(hello: m.Hello) -> int:
    """The newest protocol that both sides speak. Raises Invalid where there is none."""
    protocol = min(m.PROTOCOL, hello.protocol_max)
    if protocol < max(m.PROTOCOL_MIN, hello.protocol_min):
        raise Invalid(
            f"this daemon (kvstore {__version__}) speaks protocols {m.PROTOCOL_MIN} to {m.PROTOCOL}, "
            f"the client {hello.protocol_min} to {hello.protocol_max}: upgrade the older of the two"
        )
    return protocol


def _check_keys(keys: bytes) -> None:
    """The manager's work is bounded by what passes here."""
    if len(keys) % KEY_BYTES:
        raise Invalid(f"keys take {KEY_BYTES} bytes each; got {len(keys)} bytes")
    if len(keys) > MAX_KEYS_BYTES:
        raise Invalid(f"{len(keys) // KEY_BYTES} keys in one request, allowed are {m.MAX_KEYS}")
