"""One connection against a peer played by hand over a real socket: late, slow, cut and nonsensical answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from client_tools import Peer

from kvstore.client.connection import MAX_OUTGOING_BYTES, Connection, DeadlineMissed
from kvstore.errors import Closed, Unavailable
from kvstore.wire.frame import encode
from kvstore.wire.messages import (
    Abort,
    Done,
    Failed,
    Lease,
    Leased,
    Message,
    Pin,
    Ping,
    Release,
    Reserve,
    Reserved,
    Unpin,
)

KEY = b"k" * 32


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Peer]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)
    connection = Connection(ours)
    yield connection, Peer(theirs)
    connection.close()
    theirs.close()


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


def test_answers_are_matched_in_whatever_order_they_come(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    first, second = connection.start(Ping()), connection.start(Ping())
    peer.answer((second, Done()), (first, Failed("closed", "draining")))
    assert connection.finish(second, Done, in_s(1)) == Done()
    with pytest.raises(Closed, match="draining"):
        connection.finish(first, Done, in_s(1))
    assert not connection.broken


def test_a_deadline_is_kept_and_the_connection_goes_on(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    start_s = time.monotonic()
    with pytest.raises(DeadlineMissed) as missed:
        connection.call(Ping(), Done, in_s(0.05))
    assert 0.05 <= time.monotonic() - start_s < 0.15
    assert missed.value.waited_s >= 0.05
    assert connection.owes
    late = connection.start(Ping())
    peer.answer((late - 1, Done()), (late, Done()))
    connection.finish(late, Done, in_s(1))
    assert not connection.owes


def test_what_a_late_answer_grants_is_given_back(pair: tuple[Connection, Peer]) -> None:
    """Else each frozen second would leave a lease until its TTL, and a reservation until the engine ends."""
    connection, peer = pair
    requests = [Lease(1, 0, KEY), Reserve(1, 0, 0, KEY, KEY), Pin(1, 0, KEY), Lease(1, 0, KEY)]
    for request in requests:
        with pytest.raises(DeadlineMissed):
            connection.call(request, Done, in_s(0))
    numbers = [number for number, _ in peer.receive(4)]
    leased, reserved = Leased(70, b"\1", bytes(8), bytes(8)), Reserved(71, b"\1", bytes(8))
    pinned, nothing = Leased(72, b"\1", b"", b""), Leased(0, b"\x10", bytes(8), bytes(8))
    peer.answer(*zip(numbers, (leased, reserved, pinned, nothing), strict=True))
    connection.drain()
    given_back = peer.receive(3)
    assert [message for _, message in given_back] == [Release(70), Abort(71), Unpin(72)]
    assert connection.owes, "Unpin has an answer"
    peer.answer((given_back[2][0], Done()))
    connection.drain()
    assert not connection.owes


def test_an_answer_that_came_but_was_not_fetched_is_given_back_too(pair: tuple[Connection, Peer]) -> None:
    """As when an interrupt ends a call between two requests."""
    connection, peer = pair
    lease = connection.start(Lease(1, 0, KEY))
    ping = connection.start(Ping())
    peer.receive(2)
    peer.answer((lease, Leased(9, b"\1", bytes(8), bytes(8))), (ping, Done()))
    connection.finish(ping, Done, in_s(1))
    connection.abandon_all()
    assert peer.receive(1) == [(0, Release(9))]


def test_a_frame_is_never_cut_short_by_a_peer_that_reads_late(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    keys = bytes(32) * 4096
    while not connection._outgoing:
        with pytest.raises(DeadlineMissed):
            connection.call(Lease(1, 0, keys), Leased, in_s(0.001))
    got: list[tuple[int, Message]] = []
    reading = threading.Thread(target=lambda: got.extend(peer.receive(1)))
    reading.start()
    ping = connection.start(Ping())
    with pytest.raises(DeadlineMissed):
        connection.finish(ping, Done, in_s(0.2))
    reading.join()
    while got[-1][1] != Ping():
        got += peer.receive(1)
        connection.drain()
    assert {type(message) for _, message in got} == {Lease, Ping}
    assert all(message.keys == keys for _, message in got if isinstance(message, Lease))


def test_a_peer_that_never_reads_is_given_up_at_a_bound(pair: tuple[Connection, Peer]) -> None:
    connection, _ = pair
    message = Lease(1, 0, bytes(32) * 4096)

    def send(size_bytes: int) -> None:
        for _ in range(size_bytes // len(message.keys)):
            connection.abandon(connection.start(message))

    send(MAX_OUTGOING_BYTES // 2)
    assert not connection.broken
    with pytest.raises(Unavailable, match="reads nothing"):
        send(4 * MAX_OUTGOING_BYTES)
    assert connection.broken


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff" * 12,
        encode(Ping(), 1)[:4] + b"\xee" + encode(Ping(), 1)[5:],
        b"\x05\x00\x00\x00\x0e\x00\x00\x00\x01\x00\x00\x00\xc1\xc1\xc1\xc1\xc1",
        encode(Leased(1, b"", b"", b""), 1),
    ],
    ids=["absurd length", "unknown kind", "no MessagePack", "another answer"],
)
def test_nonsense_ends_the_connection(pair: tuple[Connection, Peer], nonsense: bytes) -> None:
    connection, peer = pair
    peer.socket.sendall(nonsense)
    with pytest.raises(Unavailable):
        connection.call(Ping(), Done, in_s(1))
    assert connection.broken


def test_answers_to_nothing_are_passed_over(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    peer.answer((999, Done()), (1, Done()))
    assert connection.call(Ping(), Done, in_s(1)) == Done()


def test_an_answer_that_comes_byte_by_byte_is_an_answer(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    answer = encode(Leased(5, bytes(64), bytes(512), bytes(512)), 1)

    def drip() -> None:
        for i in range(0, len(answer), 97):
            peer.socket.sendall(answer[i : i + 97])

    thread = threading.Thread(target=drip)
    thread.start()
    assert connection.call(Lease(1, 0, KEY), Leased, in_s(2)).lease == 5
    thread.join()


def test_the_end_of_the_peer_wakes_a_waiting_call_at_once(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    threading.Timer(0.05, peer.socket.shutdown, (socket.SHUT_RDWR,)).start()
    start_s = time.monotonic()
    with pytest.raises(Unavailable, match="closed the connection"):
        connection.call(Ping(), Done, in_s(10))
    assert time.monotonic() - start_s < 0.2


def test_another_thread_can_interrupt_a_waiting_call(pair: tuple[Connection, Peer]) -> None:
    connection, _ = pair
    threading.Timer(0.05, connection.interrupt).start()
    start_s = time.monotonic()
    with pytest.raises(Unavailable):
        connection.call(Ping(), Done, in_s(10))
    assert time.monotonic() - start_s < 0.2
