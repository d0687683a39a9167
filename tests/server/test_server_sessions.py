"""Who holds what, and until when: real processes that are killed, stopped, forked, and come back."""

from __future__ import annotations

import os
import signal
import time

import pytest
from server_rig import Rig, eventually

from kvstore.server import Limits, sessions
from kvstore.wire import messages as m
from kvstore.wire.frame import encode

SESSION = b"session of tests"
GRANTED = "1"


def key(number: int) -> str:
    return (bytes([number]) * 32).hex()


def events(rig: Rig, what: str) -> int:
    return sum(1 for event, _ in rig.manager.events if event == what)


def test_a_killed_client_ends_its_session_and_frees_its_slots(rig: Rig) -> None:
    with rig.child(session=SESSION) as child:
        assert child.tell(f"reserve {key(1)}") == GRANTED
        assert rig.manager.events == []
        child.kill()
        eventually(lambda: events(rig, "owner_gone") == 1)
        assert [event for event in rig.manager.events if event[0] == "session_closed"] == [("session_closed", SESSION)]
    assert rig.status()["sessions"] == []
    assert rig.status()["processes_in_limbo"] == 0


def test_a_closed_connection_leaves_its_slots_in_limbo_until_the_process_has_exited(rig: Rig) -> None:
    """The writer was stopped in the middle of its copy, disconnected, and might go on any time."""
    with rig.child(session=SESSION) as child:
        child.tell(f"reserve {key(1)}")
        child.tell("close 0")
        eventually(lambda: events(rig, "session_closed") == 1)
        child.pause()
        time.sleep(0.1)
        assert events(rig, "owner_gone") == 0
        assert rig.status()["processes_in_limbo"] == 1
        child.process.send_signal(signal.SIGCONT)
        assert child.tell("connect") == "done"  # it is back, but has not said that it is quiet
        assert events(rig, "owner_gone") == 0
        child.kill()
        eventually(lambda: events(rig, "owner_gone") == 1)
    assert rig.status()["processes_in_limbo"] == 0
    assert rig.count("limbo_owners_freed_total", "exited") == 1


def test_a_stopped_client_that_the_server_disconnects_stays_in_limbo() -> None:
    """It stopped with unread answers; a slow reader is disconnected, its slots are not given to others yet."""
    with Rig(Limits(slow_reader_s=0.3, write_buffer_bytes=4096)) as rig, rig.child(session=SESSION) as child:
        child.tell(f"reserve {key(1)}")
        assert child.tell("flood") == "done"
        child.pause()
        eventually(lambda: events(rig, "session_closed") == 1)
        assert rig.count("slow_readers_total") == 1
        assert rig.status()["processes_in_limbo"] == 1
        assert events(rig, "owner_gone") == 0
        child.kill()
        eventually(lambda: events(rig, "owner_gone") == 1)


def test_quiet_frees_at_once(rig: Rig) -> None:
    with rig.child(session=SESSION) as child:
        child.tell(f"reserve {key(1)}")
        child.tell("close 0")
        eventually(lambda: rig.status()["processes_in_limbo"] == 1)
        child.tell("quiet")
        assert events(rig, "owner_gone") == 1
        assert rig.count("limbo_owners_freed_total", "quiet") == 1
        assert child.tell(f"reserve {key(2)}") == GRANTED


def test_quiet_does_not_free_what_a_living_connection_reserved(rig: Rig) -> None:
    """Hello(quiet) speaks of connections that have ended. Another thread may be copying on one that has not."""
    with rig.child(session=SESSION) as child:
        child.tell(f"reserve {key(1)}")
        child.tell("connect")
        child.tell(f"reserve {key(2)}")
        child.tell("close 1")
        eventually(lambda: rig.status()["processes_in_limbo"] == 1)
        child.tell("quiet")
        assert events(rig, "owner_gone") == 1
        child.tell("close 0")
        eventually(lambda: rig.status()["processes_in_limbo"] == 1)
        assert events(rig, "owner_gone") == 1


def test_quiet_counts_for_connections_whose_end_was_not_noticed_yet() -> None:
    """The client closed one connection and said that it is quiet on the next, while requests of the first were still
    waiting for their turn: its slots went to limbo after the Hello, and stayed there as long as the process lived."""
    with Rig(Limits(turn_s=0.0)) as rig:
        with rig.client(SESSION) as first:
            first.reserve(bytes.fromhex(key(1)))
            first.socket.sendall(encode(m.Release(77), 9) * 30_000)
        with rig.client(SESSION, quiet=True) as second:
            assert rig.status()["connections"] == 2, "the first was served faster than this test expects"
            eventually(lambda: events(rig, "owner_gone") == 1)
            assert second.ask(m.Ping()) == m.Done()
        assert rig.status()["processes_in_limbo"] == 0


def test_quiet_of_another_process_or_session_frees_nothing(rig: Rig) -> None:
    with rig.child(session=SESSION) as child, rig.child(session=SESSION) as sibling:
        child.tell(f"reserve {key(1)}")
        child.tell("close 0")
        eventually(lambda: rig.status()["processes_in_limbo"] == 1)
        sibling.tell("quiet")
        with rig.client(b"another session.", quiet=True):
            assert events(rig, "owner_gone") == 0
            assert events(rig, "session_closed") == 0  # the sibling still has it


def test_a_session_lives_as_long_as_one_of_its_connections(rig: Rig) -> None:
    with rig.client(SESSION, "scheduler") as scheduler:
        with rig.child(session=SESSION) as child:
            (row,) = rig.status()["sessions"]
            assert row["processes"] == sorted([os.getpid(), child.process.pid])
            assert row["labels"] == ["child", "scheduler"]
            assert row["connections"] == 2
        eventually(lambda: rig.status()["sessions"][0]["connections"] == 1)
        assert rig.manager.events == []
        assert scheduler.ask(m.Ping()) == m.Done()
    eventually(lambda: rig.manager.events == [("session_closed", SESSION)])


def test_a_process_without_reservations_is_forgotten_with_its_last_connection(rig: Rig) -> None:
    """No pidfd is kept for it: an engine that connects and leaves a thousand times costs nothing."""
    rig.client().close()  # libuv opens a spare descriptor with the first connection
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        rig.client().close()
    eventually(lambda: rig.status()["connections"] == 0)
    eventually(lambda: len(os.listdir("/proc/self/fd")) == before)
    assert events(rig, "owner_gone") == 0


def test_connections_held_open_by_a_fork_end_with_their_process() -> None:
    """The engine was killed, a worker it had forked kept the socket open, and the leases would have lasted for ever."""
    with Rig(Limits(gone_grace_s=0.05)) as rig, rig.child(session=SESSION) as child:
        child.tell(f"reserve {key(1)}")
        forked = int(child.tell("fork"))
        try:
            child.kill()
            eventually(lambda: events(rig, "owner_gone") == 1)
            assert events(rig, "session_closed") == 1
            os.kill(forked, 0)  # it is alive
        finally:
            os.kill(forked, signal.SIGKILL)


def test_limbo_of_one_process_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_LIMBO", 3)
    for number in range(3):
        with rig.client(SESSION) as client:
            client.reserve(bytes([number]) * 32)
    eventually(lambda: rig.status()["connections"] == 0)
    with rig.connect() as client:
        answer = client.ask(m.Hello(1, 1, SESSION, want_fds=False))
        assert isinstance(answer, m.Failed)
        assert answer.code == "throttled"
    with rig.client(SESSION, quiet=True) as client:
        assert events(rig, "owner_gone") == 3
        assert client.ask(m.Ping()) == m.Done()
