"""The daemon that all other tests, the benchmarks and the demonstration run: it starts, dies and comes back."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from kvstore.errors import Unavailable
from kvstore.testing.daemon import DaemonProcess
from kvstore.units import MiB


def accepts(daemon: DaemonProcess) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(daemon.socket_path)) == 0


def test_serves_is_killed_and_serves_again(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(arena_bytes=64 * MiB, ssd_bytes=64 * MiB)
    first = daemon.pid
    assert daemon.running
    assert accepts(daemon)
    daemon.kill()
    assert not daemon.running
    assert not accepts(daemon)
    daemon.start()
    assert daemon.pid != first
    assert daemon.stop() == 0


def test_a_daemon_that_cannot_start_says_why(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(start=False, arena_bytes=64 * MiB, settings={"arena.sise": 1})
    with pytest.raises(Unavailable, match=r"arena\.si[sz]e"):
        daemon.start()
    assert not daemon.running


def test_nothing_is_left_of_a_closed_daemon(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(arena_bytes=64 * MiB, ssd_bytes=0)
    pid = daemon.pid
    daemon.close()
    assert not daemon.socket_path.parent.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
