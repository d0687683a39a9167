"""Requests of greeted clients: bad ones are answered and the connection goes on; bounds and fairness among clients."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from typing import Any

import pytest
from server_manager import WatchedManager
from server_raw_client import RawClient
from server_rig import Rig, eventually

from kvstore.server import Limits
from kvstore.wire import messages as m
from kvstore.wire.frame import encode

KEY = b"k" * 32
BAD_REQUESTS = {
    "unknown root": m.Lookup(4242, 0, KEY),
    "unknown root of a lease": m.Lease(4242, 0, KEY),
    "negative root": m.Lookup(-1, 0, KEY),
    "key of 31 bytes": m.Lookup(1, 0, KEY[:31]),
    "keys of 65 bytes": m.Lease(1, 0, KEY * 2 + b"x"),
    "too many keys": m.Lookup(1, 0, KEY * (m.MAX_KEYS + 1)),
    "too many keys to pin": m.Pin(1, 0, KEY * (m.MAX_KEYS + 1)),
    "parents of another length": m.Reserve(1, 0, 0, KEY * 2, bytes(32)),
    "a pin that lasts NaN": m.Pin(1, 0, KEY, math.nan),
    "a pin that lasts for ever": m.Pin(1, 0, KEY, math.inf),
    "unknown pool": m.Lookup(1, 9, KEY),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_answered_and_the_connection_goes_on(rig: Rig, case: str) -> None:
    with rig.client() as client:
        answer = client.ask(BAD_REQUESTS[case])
        assert isinstance(answer, m.Failed)
        assert answer.code == "invalid"
        assert len(answer.message) > 10
        assert isinstance(client.ask(m.Lookup(client.root, 0, KEY)), m.Tiers)
    assert rig.count("requests_failed_total", "invalid") == 1


def test_the_most_keys_are_served(rig: Rig) -> None:
    with rig.client() as client:
        assert client.ask(m.Lookup(client.root, 0, os.urandom(32 * m.MAX_KEYS))) == m.Tiers(b"")


@pytest.mark.parametrize("message", [m.Release(77, -1, 0.0), m.Release(77, 1, math.nan), m.Release(77), m.Abort(77)])
def test_one_way_messages_are_never_answered(rig: Rig, message: m.Message) -> None:
    with rig.client() as client:
        client.send(message)
        assert client.ask(m.Ping()) == m.Done()  # `ask` checks that this is the next answer


class HeldCommits(WatchedManager):
    """Commits that wait for a device that takes its time: `let_go` ends the wait."""

    held: list[asyncio.Future[m.Committed]]

    def commit(self, *arguments: Any) -> asyncio.Future[m.Committed]:
        future = asyncio.get_running_loop().create_future()
        self.held = [*getattr(self, "held", []), future]
        return future

    def let_go(self) -> None:
        for number, future in reversed(list(enumerate(self.held))):
            future.set_result(m.Committed(bytes([number])))


def test_answers_in_any_order_and_a_bound_on_those_in_flight() -> None:
    with Rig(Limits(max_in_flight=3), manager=HeldCommits) as rig, rig.client() as client:
        waiting = [client.send(m.Commit(1, 0, 1, durable=True)) for _ in range(3)]
        refused = client.ask(m.Commit(1, 0, 1, durable=True))
        assert isinstance(refused, m.Failed)
        assert refused.code == "throttled"
        client.send(m.Release(1))  # a one-way message is not refused: what it frees may be what is waited for
        with rig.client() as other:
            assert other.ask(m.Ping()) == m.Done()
        rig.run(rig.manager.let_go)
        answers = [client.receive() for _ in range(3)]
        assert answers == [(waiting[i], m.Committed(bytes([i]))) for i in (2, 1, 0)]
        assert client.ask(m.Ping()) == m.Done()


def test_an_answer_that_comes_after_its_client_has_gone_is_dropped() -> None:
    with Rig(manager=HeldCommits) as rig:
        with rig.client() as client:
            client.send(m.Commit(1, 0, 1, durable=True))
            eventually(lambda: bool(getattr(rig.manager, "held", [])))
        eventually(lambda: rig.status()["connections"] == 0)
        rig.run(rig.manager.let_go)
        assert rig.count("internal_errors_total") == 0


class Buggy(WatchedManager):
    """A bug of ours, at once or later."""

    def stats(self) -> dict[str, Any]:
        raise ZeroDivisionError("a bug")

    def commit(self, *arguments: Any) -> asyncio.Future[m.Committed]:
        future: asyncio.Future[m.Committed] = asyncio.get_running_loop().create_future()
        future.set_exception(LookupError("a bug"))
        return future


@pytest.mark.parametrize(("message", "kind"), [(m.Stats(), "ZeroDivisionError"), (m.Commit(1, 0, 1), "LookupError")])
def test_a_bug_ends_one_connection_and_is_logged(
    message: m.Message, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Rig(manager=Buggy) as rig, rig.client() as victim, rig.client() as other:
        victim.send(message)
        assert victim.closed()
        assert other.ask(m.Ping()) == m.Done()
        assert rig.count("internal_errors_total", kind) == 1
        assert len(rig.status()["sessions"]) == 1
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert kind in logging.Formatter().formatException(record.exc_info)


def test_a_bug_in_a_loop_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with Rig(manager=Buggy) as rig:
        for _ in range(40):
            with rig.client() as victim:
                victim.send(m.Stats())
                assert victim.closed()
        assert rig.count("internal_errors_total") == 40
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 10


def test_a_bug_in_a_later_turn_ends_the_connection_too() -> None:
    """Frames that wait for their turn are served from a loop callback, where no transport catches the exception."""
    with Rig(Limits(turn_s=0.0), manager=Buggy) as rig, rig.client() as victim, rig.client() as other:
        victim.socket.sendall(encode(m.Ping(), 1) * 3 + encode(m.Stats(), 2) + encode(m.Ping(), 3))
        assert [victim.receive()[0] for _ in range(3)] == [1, 1, 1]
        assert victim.closed()
        assert other.ask(m.Ping()) == m.Done()
        assert rig.count("internal_errors_total") == 1


def test_one_client_with_thousands_of_requests_does_not_hold_up_another(rig: Rig) -> None:
    """All of one read of a socket used to be a single turn: ten thousand small requests came before anybody else."""
    requests = 120_000  # long enough for a busy machine: about 20 turns of the other at 5 in 30 000
    with rig.client() as greedy, rig.client() as modest:
        reader = threading.Thread(target=_read_all, args=(greedy, requests))
        burst = encode(m.Ping(), 1) * requests
        sender = threading.Thread(target=greedy.socket.sendall, args=(burst,))
        reader.start()
        sender.start()
        served_before = []
        while reader.is_alive():
            assert modest.ask(m.Ping()) == m.Done()
            served_before.append(reader.is_alive())
        sender.join()
        reader.join()
    assert sum(served_before) > 5


def _read_all(client: RawClient, answers: int) -> None:
    for _ in range(answers):
        client.receive()


def test_a_slow_reader_is_disconnected_while_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing more of it is served meanwhile, so what the daemon holds for it is bounded."""
    limits = Limits(slow_reader_s=0.3, write_buffer_bytes=64 << 10)
    with Rig(limits) as rig, rig.client() as slow, rig.client() as other:
        lease = encode(m.Lease(slow.root, 0, os.urandom(32 * 1024)), 1)
        slow.socket.settimeout(0.1)
        with pytest.raises(TimeoutError):  # the daemon stops to read
            slow.socket.sendall(lease * 4000)
        assert other.ask(m.Ping()) == m.Done()
        served = rig.count("requests_total", "Lease")
        assert served < 200
        eventually(lambda: rig.count("slow_readers_total") == 1)
        assert other.ask(m.Ping()) == m.Done()
        eventually(lambda: rig.status()["connections"] == 1)
    assert any("left its answers unread" in record.getMessage() for record in caplog.records)


def test_a_reader_that_pauses_gets_every_answer() -> None:
    limits = Limits(slow_reader_s=5, write_buffer_bytes=16 << 10)
    requests = 400
    with Rig(limits) as rig, rig.client() as client:
        lease = m.Lease(client.root, 0, os.urandom(32 * 256))
        sender = threading.Thread(
            target=lambda: [client.socket.sendall(encode(lease, 100 + number)) for number in range(requests)]
        )
        sender.start()
        time.sleep(0.2)
        assert [client.receive()[0] for _ in range(requests)] == list(range(100, 100 + requests))
        sender.join()
        assert rig.count("slow_readers_total") == 0
