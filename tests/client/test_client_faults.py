"""Daemons that are absent, killed, frozen, replaced; clients that fork, die or are stopped in the middle of a write."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from client_tools import admin, chunk, chunks, empty, eventually, fresh_keys, namespace

from kvstore.client import Ack, Client, Load
from kvstore.testing.daemon import DaemonProcess
from kvstore.units import MiB

DEADLINE_S = 0.2
"""Of the clients here: long enough for a loaded machine, short enough to be told from a hang."""
SLACK_S = 0.15


def test_without_a_daemon_everything_is_a_miss_until_there_is_one(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon(start=False, ssd_bytes=0, arena_bytes=64 * MiB)
    start_s = time.monotonic()
    with Client(daemon.socket_path, deadline_s=DEADLINE_S) as client:
        assert time.monotonic() - start_s < DEADLINE_S + SLACK_S
        root, keys = client.root(namespace()), fresh_keys(2)
        assert not client.connected
        assert "no daemon answers" in client.last_error
        assert root.batch_set(keys, None, chunks(keys)) == [Ack.REFUSED_UNAVAILABLE] * 2
        assert root.batch_get(keys, empty(2)) == [Load.MISS_UNAVAILABLE] * 2
        assert root.lookup(keys).run == 0
        assert root.lease(keys).codes == [Load.MISS_UNAVAILABLE] * 2
        assert root.reserve(keys).codes == [Ack.REFUSED_UNAVAILABLE] * 2
        assert root.pin(keys).codes == [Load.MISS_UNAVAILABLE] * 2
        assert client.ping() is None
        assert client.stats()["daemon"] is None
        daemon.start()
        assert client.wait_connected(2.0)
        assert all(ack.stored for ack in root.batch_set(keys, None, chunks(keys)))


def test_a_killed_daemon_is_a_miss_within_50_ms_and_the_next_one_is_used_by_itself(daemon: DaemonProcess) -> None:
    """Peers took 10 to 300 s to notice. Durable chunks must be there again, from the same root object."""
    with Client(daemon.socket_path, deadline_s=5.0) as client:
        root, keys = client.root(namespace()), fresh_keys(4)
        assert root.batch_set(keys, None, chunks(keys), durable=True) == [Ack.STORED_SSD] * 4
        lease, reservation = root.lease(keys), root.reserve(fresh_keys(1))
        daemon.kill()
        start_s = time.monotonic()
        assert root.batch_get(keys, empty(4)) == [Load.MISS_UNAVAILABLE] * 4
        assert time.monotonic() - start_s < 0.05
        assert lease.valid(0), "its arena is still mapped, nobody writes there any more"
        assert bytes(lease.view(0)) == chunk(keys[0]).tobytes()
        daemon.start()
        assert client.wait_connected(2.0)
        assert reservation.commit() == [Ack.REFUSED_CLOSED], "an old slot means nothing in the new arena"
        assert not lease.renew()
        lease.release()
        out = empty(4)
        assert root.batch_get(keys, out) == [Load.SSD] * 4
        assert all((got == chunk(key)).all() for key, got in zip(keys, out, strict=True))
        assert client.stats()["client"]["connects_total"] == 2


def test_a_daemon_killed_under_a_running_call_is_noticed_within_50_ms(daemon: DaemonProcess) -> None:
    with Client(daemon.socket_path, deadline_s=10.0) as client:
        root, keys = client.root(namespace()), fresh_keys(1)
        root.batch_set(keys, None, chunks(keys))
        os.kill(daemon.pid, signal.SIGSTOP)
        returned_s: list[float] = []

        def get() -> None:
            assert root.batch_get(keys, empty(1)) == [Load.MISS_UNAVAILABLE]
            returned_s.append(time.monotonic())

        thread = threading.Thread(target=get)
        thread.start()
        time.sleep(0.1)
        killed_s = time.monotonic()
        daemon.kill()
        thread.join()
        assert returned_s[0] - killed_s < 0.05


def test_a_frozen_daemon_costs_one_deadline_and_nothing_is_left_held_when_it_goes_on(daemon: DaemonProcess) -> None:
    with Client(daemon.socket_path, deadline_s=DEADLINE_S) as client:
        root, keys = client.root(namespace()), fresh_keys(4)
        assert all(ack.stored for ack in root.batch_set(keys[:2], None, chunks(keys[:2])))
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            start_s = time.monotonic()
            late = root.reserve(keys[2:])
            waited_s = time.monotonic() - start_s
            assert late.codes == [Ack.REFUSED_UNAVAILABLE] * 2
            assert DEADLINE_S <= waited_s < DEADLINE_S + SLACK_S
            assert client.breaker_state != "closed"
            start_s = time.monotonic()
            for _ in range(100):
                assert root.batch_get(keys[:2], empty(2)) == [Load.MISS_UNAVAILABLE] * 2
            assert time.monotonic() - start_s < DEADLINE_S, "a miss at once, not one deadline each"
            eventually(lambda: client.breaker_state == "half-open", "a probe waits for the daemon")
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        eventually(lambda: client.breaker_state == "closed", "the probe was answered")
        assert root.batch_get(keys[:2], empty(2)) == [Load.DRAM] * 2

        def reservations() -> int:
            return sum(row["reservations"] for row in admin(daemon.admin_path, "status")["sessions"])

        eventually(lambda: reservations() == 0, "the reservation that nobody waited for is given back")


def test_a_lease_that_was_answered_too_late_is_released(daemon: DaemonProcess) -> None:
    with Client(daemon.socket_path, deadline_s=DEADLINE_S) as client:
        root, keys = client.root(namespace()), fresh_keys(2)
        root.batch_set(keys, None, chunks(keys))
        os.kill(daemon.pid, signal.SIGSTOP)
        assert root.lease(keys).codes == [Load.MISS_DEADLINE] * 2
        os.kill(daemon.pid, signal.SIGCONT)

        def leases() -> int:
            return sum(row["leases"] for row in admin(daemon.admin_path, "status")["sessions"])

        eventually(lambda: client.breaker_state == "closed", "the probe was answered")
        eventually(lambda: leases() == 0, "the late lease is released")
        assert admin(daemon.admin_path, "stat")["counters"]["requests_total"]["Lease"] == 1


def test_a_daemon_frozen_while_it_fills_does_not_hold_a_get_beyond_its_deadline(daemon: DaemonProcess) -> None:
    """The waiting happens in shared memory then, where no socket tells that nobody will ever come."""
    with Client(daemon.socket_path, deadline_s=DEADLINE_S) as client:
        root, keys = client.root(namespace(4 * MiB)), fresh_keys(8)
        data = chunks(keys, 4 * MiB)
        for i, key in enumerate(keys):
            assert root.batch_set([key], keys[i - 1 : i] or None, [data[i]], durable=True) == [Ack.STORED_SSD]
        daemon.kill()
        daemon.start()
        assert client.wait_connected(2.0)
        for _ in range(20):
            start_s = time.monotonic()
            thread = threading.Timer(0.004, os.kill, (daemon.pid, signal.SIGSTOP))
            thread.start()
            out = empty(8, 4 * MiB)
            loads = root.batch_get(keys, out)
            took_s = time.monotonic() - start_s
            thread.join()
            os.kill(daemon.pid, signal.SIGCONT)
            assert took_s < DEADLINE_S + 8 * 4 * MiB / 1e9 + SLACK_S
            for got, want, load in zip(out, data, loads, strict=True):
                assert not load.hit or (got == want).all()
            if not all(load.hit for load in loads):
                break
        eventually(lambda: client.breaker_state == "closed", "it goes on")


def test_a_forked_child_only_misses_and_costs_its_parent_nothing(daemon: DaemonProcess) -> None:
    """The child shares the parent's socket and arena: a call there would mix two streams of answers.

    In a process of its own: Python warns of forks of processes with threads, and the suite makes warnings errors.
    """
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from client_tools import namespace, fresh_keys, chunks, empty
from kvstore.client import Client
client = Client({str(daemon.socket_path)!r}, deadline_s=2.0)
assert client.wait_connected(5)
root, keys = client.root(namespace()), fresh_keys(2)
root.batch_set(keys, None, chunks(keys))
links = ["/proc/self/fd/" + fd for fd in os.listdir("/proc/self/fd")]
sockets = [link for link in links if os.path.lexists(link) and "socket" in os.readlink(link)]
assert len(sockets) >= 2
child = os.fork()
if child == 0:
    left = [link for link in sockets if os.path.lexists(link)]
    codes = [code.name for code in root.batch_get(keys, empty(2))]
    acks = [code.name for code in root.batch_set(keys, None, chunks(keys))]
    client.close()
    ok = left == [] and codes == ["MISS_UNAVAILABLE"] * 2 and acks == ["REFUSED_UNAVAILABLE"] * 2
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert [code.name for code in root.batch_get(keys, empty(2))] == ["DRAM"] * 2
client.close()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr


def test_a_client_that_is_killed_leaves_nothing_behind(daemon: DaemonProcess) -> None:
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from client_tools import namespace, fresh_keys, chunks
from kvstore.client import Client
client = Client({str(daemon.socket_path)!r}, deadline_s=2.0)
root, keys = client.root(namespace()), fresh_keys(4)
root.batch_set(keys[:2], None, chunks(keys[:2]))
held = root.lease(keys[:2]), root.reserve(keys[2:]), root.pin(keys[:2])
assert len(held[1].view(0)) > 0
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr

    def held() -> list[int]:
        dram = admin(daemon.admin_path, "status")["dram"]
        return [dram["reserved_bytes"], dram["pinned_bytes"]]

    eventually(lambda: held() == [0, 0], "leases, pins and reservations ended with the process")


def test_a_writer_that_outlives_its_daemon_harms_nobody(daemon: DaemonProcess) -> None:
    """A view of a slot of the old arena, written after the restart, must not show through in the new one."""
    with Client(daemon.socket_path, deadline_s=2.0) as client:
        root = client.root(namespace())
        reservation = root.reserve(fresh_keys(4))
        views = [np.frombuffer(reservation.view(i), np.uint8) for i in range(4)]
        daemon.kill()
        daemon.start()
        eventually(lambda: client.stats()["client"]["connects_total"] == 2, "connected again")
        keys = fresh_keys(4)
        assert all(ack.stored for ack in root.batch_set(keys, None, chunks(keys)))
        for view in views:
            view[:] = 0xEE
        out = empty(4)
        assert root.batch_get(keys, out) == [Load.DRAM] * 4
        assert all((got == chunk(key)).all() for key, got in zip(keys, out, strict=True))


def test_closing_gives_everything_back_and_later_calls_are_misses(daemon: DaemonProcess) -> None:
    """That no thread or descriptor is left is checked around every test."""
    client = Client(daemon.socket_path, deadline_s=2.0)
    root, keys = client.root(namespace()), fresh_keys(1)
    root.batch_set(keys, None, chunks(keys))
    lease = root.lease(keys)
    view = lease.view(0)
    client.close()
    client.close()
    assert root.batch_get(keys, empty(1)) == [Load.MISS_UNAVAILABLE]
    assert bytes(view) == chunk(keys[0]).tobytes(), "a view that is still held is still memory"
    lease.release()
    eventually(lambda: admin(daemon.admin_path, "status")["dram"]["pinned_bytes"] == 0, "the session has ended")


def test_a_kill_in_the_middle_of_heavy_use_never_gives_wrong_bytes(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(arena_bytes=64 * MiB, ssd_bytes=0)
    wrong: list[bytes] = []
    hits: list[int] = []
    stop = threading.Event()
    with Client(daemon.socket_path, deadline_s=DEADLINE_S) as client:
        root = client.root(namespace())

        def work() -> None:
            keys = [fresh_keys(8) for _ in range(12)]  # of all threads together more than the arena holds
            choice = random.Random(7)
            while not stop.is_set():
                batch = choice.choice(keys)
                out = empty(8)
                for key, got, load in zip(batch, out, root.batch_get(batch, out), strict=True):
                    if load.hit:
                        hits.append(1)
                        if not (got == chunk(key)).all():
                            wrong.append(key)
                root.batch_set(batch, None, chunks(batch))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                seen = len(hits)
                eventually(lambda seen=seen: len(hits) > seen + 50, "hits go on")  # type: ignore[misc]
                daemon.kill()
                daemon.start()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert wrong == []


@pytest.mark.parametrize("answer", [b"\xff" * 64, b"", b"\x00\x00\x00\x00\x04\x00\x00\x00\x01\x00\x00\x00"])
def test_whoever_listens_but_is_no_daemon_is_no_daemon(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(5)
        with Client(path, deadline_s=DEADLINE_S) as client:
            for _ in range(2):
                peer, _ = listener.accept()
                peer.settimeout(5)
                peer.recv(4096)
                peer.sendall(answer)
                peer.close()
            assert not client.connected
            assert client.root(namespace()).batch_exists(fresh_keys(3)) == 0
