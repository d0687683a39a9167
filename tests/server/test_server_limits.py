"""Many connections, no descriptors: newcomers are told, those inside go on."""

from __future__ import annotations

import os
import resource
import socket

from server_rig import Rig, eventually

from kvstore.server import Limits
from kvstore.wire import messages as m
from kvstore.wire.frame import FrameReader


def test_too_many_connections_are_told_so_and_others_go_on() -> None:
    with Rig(Limits(max_connections=3)) as rig, rig.client() as first, rig.client() as second:
        with rig.connect():  # silent, and counted all the same
            eventually(lambda: rig.status()["connections"] == 3)
            with rig.connect() as fourth:
                request, answer = fourth.receive()
                assert request == 0
                assert isinstance(answer, m.Failed)
                assert answer.code == "throttled"
                assert "3 connections" in answer.message
                assert fourth.closed()
            assert first.ask(m.Ping()) == second.ask(m.Ping()) == m.Done()
        eventually(lambda: rig.status()["connections"] == 2)
        with rig.client() as third:
            assert third.ask(m.Ping()) == m.Done()
        assert rig.count("connections_refused_total", "throttled") == 1


def test_a_crowd_at_the_door_neither_leaks_nor_starves(rig: Rig) -> None:
    """More connections than one turn of the accept loop takes, all at once, some of them gone again at once."""
    with rig.client() as inside:
        crowd = [rig.connect() for _ in range(200)]
        for client in crowd[::2]:
            client.close()
        assert inside.ask(m.Ping()) == m.Done()
        for client in crowd[1::2]:
            client.greet()
        eventually(lambda: rig.status()["connections"] == 101)
        for client in crowd:
            client.close()
        eventually(lambda: rig.status()["connections"] == 1)
        assert rig.count("internal_errors_total") == 0


def test_out_of_descriptors_the_daemon_waits_and_then_goes_on(rig: Rig) -> None:
    """accept(2) fails with EMFILE while the connection stays in the backlog: neither a crash nor a busy loop."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with rig.client() as inside:
        late = [socket.socket(socket.AF_UNIX) for _ in range(5)]
        highest = max(int(number) for number in os.listdir("/proc/self/fd"))
        fill = [os.dup(0) for _ in range(highest)]  # no hole below the limit
        used = max(fill) + 1
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
            for client in late:
                client.connect(os.fspath(rig.socket_path))
            eventually(lambda: rig.count("accept_failures_total", "EMFILE") >= 1)
            assert inside.ask(m.Ping()) == m.Done()
            assert rig.count("accept_failures_total") < 20
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for number in fill:
                os.close(number)
        eventually(lambda: rig.run(lambda: len(rig.server.connections)) == 6)
        for client in late:
            client.close()


def test_short_of_a_descriptor_for_the_pidfd_the_peer_is_told(rig: Rig) -> None:
    """One descriptor is left for the connection, none for its process: it is turned away, with a reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as late:
        late.settimeout(10)
        highest = max(int(number) for number in os.listdir("/proc/self/fd"))
        fill = [os.dup(0) for _ in range(highest)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(fill) + 2, hard))
            late.connect(os.fspath(rig.socket_path))
            ((_, answer),) = FrameReader().feed(late.recv(4096))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for number in fill:
                os.close(number)
    assert isinstance(answer, m.Failed)
    assert answer.code == "throttled"
    assert "no descriptor left" in answer.message
    with rig.client() as client:
        assert client.ask(m.Ping()) == m.Done()
