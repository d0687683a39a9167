"""Hello and Welcome: versions, sessions, descriptors, credentials, silence."""

from __future__ import annotations

import logging
import os
import socket
import time

import pytest
from server_rig import Rig, eventually

from kvstore.arena import ArenaMapping
from kvstore.server import Limits
from kvstore.wire import messages as m
from kvstore.wire.frame import FrameReader, encode

SESSION = b"s" * 16


@pytest.mark.parametrize(("lowest", "highest"), [(0, 0), (2, 3), (5, 1), (-9, -1)])
def test_no_common_protocol_is_refused_with_both_ranges(rig: Rig, lowest: int, highest: int) -> None:
    with rig.connect() as client:
        answer = client.ask(m.Hello(lowest, highest, SESSION))
        assert isinstance(answer, m.Failed)
        assert answer.code == "invalid"
        assert f"{lowest} to {highest}" in answer.message
        assert client.closed()


def test_a_newer_client_that_still_speaks_ours_gets_ours(rig: Rig) -> None:
    with rig.connect() as client:
        answer = client.ask(m.Hello(1, 9, SESSION, want_fds=False))
        assert isinstance(answer, m.Welcome)
        assert answer.protocol == m.PROTOCOL


@pytest.mark.parametrize(
    ("session", "label"),
    [
        (b"", "x"),
        (b"s" * 15, "x"),
        (b"s" * 17, "x"),
        (SESSION, "x" * 129),
        (SESSION, "two\nlines"),
        (SESSION, "\x1b[2J"),
    ],
)
def test_session_and_label_are_checked(rig: Rig, session: bytes, label: str) -> None:
    with rig.connect() as client:
        answer = client.ask(m.Hello(1, 1, session, label))
        assert isinstance(answer, m.Failed)
        assert answer.code == "invalid"
        assert client.closed()
    assert rig.status()["sessions"] == []


@pytest.mark.parametrize("message", [m.Ping(), m.Lookup(1, 0, bytes(32)), m.Release(1), m.Welcome(1, b"", 0, 0, "")])
def test_nothing_before_hello(rig: Rig, message: m.Message) -> None:
    with rig.connect() as client:
        client.send(message)
        _, answer = client.receive()
        assert isinstance(answer, m.Failed)
        assert "first frame must be Hello" in answer.message
        assert client.closed()


def test_requests_may_follow_hello_without_waiting(rig: Rig) -> None:
    with rig.connect() as client:
        client.send(m.Hello(1, 1, SESSION, want_fds=False))
        client.send(m.Ping())
        assert [type(client.receive()[1]) for _ in range(2)] == [m.Welcome, m.Done]


def test_a_silent_client_is_closed_and_a_talking_one_is_not() -> None:
    with Rig(Limits(handshake_s=0.15)) as rig, rig.connect() as silent, rig.client() as talking, rig.admin() as admin:
        started_s = time.monotonic()
        for client in (silent, admin):
            _, answer = client.receive()
            assert isinstance(answer, m.Failed)
            assert "no request within 0.15 s" in answer.message
            assert client.closed()
        assert time.monotonic() - started_s < 5
        time.sleep(0.2)
        assert talking.ask(m.Ping()) == m.Done()


def test_a_client_that_drips_its_hello_is_closed_too() -> None:
    with Rig(Limits(handshake_s=0.15)) as rig, rig.connect() as client:
        for byte in encode(m.Hello(1, 1, SESSION), 1)[:8]:
            client.socket.sendall(bytes([byte]))
            time.sleep(0.01)
        assert isinstance(client.receive()[1], m.Failed)


def test_the_descriptors_are_those_of_the_arena(rig: Rig) -> None:
    with rig.connect() as client:
        client.socket.sendall(encode(m.Hello(1, 1, SESSION), 1))
        data, fds, _, _ = socket.recv_fds(client.socket, 65536, 8)
        ((_, welcome),) = FrameReader().feed(data)
        assert isinstance(welcome, m.Welcome)
        assert len(fds) == 2
        mapping = ArenaMapping(*fds, welcome.arena_bytes, welcome.control_bytes, welcome.arena_id)
        rig.run(lambda: rig.manager.arena.data.__setitem__(slice(0, 4), b"seen"))
        assert bytes(mapping.data[:4]) == b"seen"
        mapping.close()


def test_a_client_without_want_fds_gets_none(rig: Rig) -> None:
    with rig.connect() as client:
        client.socket.sendall(encode(m.Hello(1, 1, SESSION, want_fds=False), 1))
        _, fds, _, _ = socket.recv_fds(client.socket, 65536, 8)
        assert fds == []


def test_credentials_are_logged_and_the_session_is_not(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A session's id lets its owner in, so the log and `status` show its first bytes only."""
    session = os.urandom(16)
    with caplog.at_level(logging.INFO, "kvstore.server"), rig.client(session, "engine 1 rank 0"):
        rows = rig.status()["sessions"]
    (line,) = [r.getMessage() for r in caplog.records if "engine 1 rank 0" in r.getMessage()]
    assert f"process {os.getpid()}, user {os.getuid()}, group {os.getgid()}" in line
    assert rows[0]["labels"] == ["engine 1 rank 0"]
    assert rows[0]["processes"] == [os.getpid()]
    assert session.hex() not in line + str(rows)


def test_a_client_gone_before_its_welcome_leaves_nothing(rig: Rig) -> None:
    for _ in range(50):
        with rig.connect() as client:
            client.socket.sendall(encode(m.Hello(1, 1, os.urandom(16)), 1))
    eventually(lambda: rig.status()["connections"] == 0)
    assert rig.status()["sessions"] == []
    assert rig.count("internal_errors_total") == 0
