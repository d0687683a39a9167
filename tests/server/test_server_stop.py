"""Stopping: what is asked already is answered, newcomers are not let in, the deadline holds."""

from __future__ import annotations

import threading
import time

import pytest
from server_rig import Rig, eventually
from test_server_requests import HeldCommits

from kvstore.wire import messages as m


def test_answers_that_are_waited_for_are_sent_before_the_end() -> None:
    with Rig(manager=HeldCommits) as rig, rig.client() as client:
        request = client.send(m.Commit(1, 0, 1, durable=True))
        eventually(lambda: bool(getattr(rig.manager, "held", [])))
        cut: list[int] = []
        stopping = threading.Thread(target=lambda: cut.append(rig.run(lambda: rig.server.stop(10))))
        stopping.start()
        eventually(lambda: not rig.socket_path.exists())
        with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
            rig.connect()
        client.send(m.Ping())  # too late: not served
        rig.run(rig.manager.let_go)
        assert client.receive() == (request, m.Committed(b"\0"))
        assert client.closed()
        stopping.join()
        assert cut == [0]


def test_the_deadline_cuts_what_does_not_come_and_says_how_much() -> None:
    with Rig(manager=HeldCommits) as rig, rig.client() as client:
        for _ in range(3):
            client.send(m.Commit(1, 0, 1, durable=True))
        eventually(lambda: len(getattr(rig.manager, "held", [])) == 3)
        started_s = time.monotonic()
        assert rig.run(lambda: rig.server.stop(0.1)) == 3
        assert time.monotonic() - started_s < 3
        assert client.closed()
        rig.run(rig.manager.let_go)  # answers to nobody


def test_a_client_that_reads_nothing_does_not_hold_the_end_up() -> None:
    with Rig() as rig, rig.client() as client:
        lease = m.Lease(client.root, 0, bytes(32 * 4096))
        for _ in range(8):
            client.send(lease)
        eventually(lambda: rig.count("requests_total", "Lease") >= 3)
        started_s = time.monotonic()
        rig.run(lambda: rig.server.stop(0.1))
        assert time.monotonic() - started_s < 5


def test_sessions_end_with_the_server() -> None:
    with Rig() as rig, rig.client(b"s" * 16), rig.client(b"s" * 16), rig.connect():
        rig.run(lambda: rig.server.stop(0.1))
        assert rig.manager.events == [("session_closed", b"s" * 16)]
