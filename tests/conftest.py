"""Fixtures for all tests: a real daemon process, and a leak check around every test.

The leak check is autouse: whoever leaves a file descriptor, a thread, a mapped arena or a named shared memory of ours
behind fails, by name. Other programs' entries in /dev/shm are none of our business.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.testing.daemon import DaemonProcess

LEAK_GRACE_S = 2.0
"""Threads that were told to end and sockets being closed may need a moment."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the long tests too (kill cycles, big scales)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="long: run with --slow"))
        if "root" in item.keywords and os.geteuid() != 0:
            marker = item.get_closest_marker("root")
            why = marker.args[0] if marker is not None and marker.args else "what it does needs privileges"
            item.add_marker(pytest.mark.skip(reason=f"needs root: {why}"))


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Factory of started daemons, for tests that want sizes or settings of their own; all are killed at the end.

    Arguments as DaemonProcess; `folder` defaults to one in tmp_path. Not started with `start=False`.
    """
    daemons: list[DaemonProcess] = []

    def make(folder: Path | None = None, *, start: bool = True, **options: object) -> DaemonProcess:
        daemon = DaemonProcess(folder or tmp_path / f"daemon{len(daemons)}", **options)  # type: ignore[arg-type]
        daemons.append(daemon)
        return daemon.start() if start else daemon

    yield make
    for daemon in daemons:
        daemon.close()


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """A running daemon with an arena of 256 MiB and 512 MiB of SSD; killed at the end of the test."""
    return make_daemon()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = _held()
    yield
    deadline_s = time.monotonic() + LEAK_GRACE_S
    while left := _held() - before:
        if time.monotonic() > deadline_s:
            pytest.fail("left behind: " + ", ".join(sorted(left)))
        gc.collect()
        time.sleep(0.01)


def _held() -> set[str]:
    """What this process holds, each by a name that tells what it is."""
    held = {f"thread {thread.name}" for thread in threading.enumerate()}
    held |= {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith("kvstore")}
    held |= {f"mapping {line.split(maxsplit=5)[5].strip()}" for line in _shared_mappings()}
    for number in os.listdir("/proc/self/fd"):
        try:
            held.add(f"fd {number} -> {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return held


def _shared_mappings() -> list[str]:
    """This process's own mappings of shared memory: whole arenas would be lost with them."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:kvstore" in line]
