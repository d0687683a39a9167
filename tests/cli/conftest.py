"""The `kvstore` command as its users run it: the installed console script in a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import KVSTORE, Cli, Result

from kvstore.testing.daemon import DaemonProcess
from kvstore.units import MiB


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """cli(*words, stdin=b"", socket=..., environ=...) runs the command in an empty environment and returns a Result."""

    def run(*words: object, stdin: bytes = b"", environ: dict[str, str] | None = None) -> Result:
        clean = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "PYTHONPATH")}
        clean |= {"HOME": str(tmp_path), "KVSTORE_CONFIG": "/dev/null"} | (environ or {})
        done = subprocess.run(
            [KVSTORE, *map(str, words)], input=stdin, capture_output=True, timeout=60, env=clean, cwd=tmp_path
        )
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        return Result(done.returncode, done.stdout, done.stderr.decode())

    return run


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon for all tests of a file, which use names of their own in it: a start costs half a second."""
    with DaemonProcess(tmp_path_factory.mktemp("shared"), arena_bytes=128 * MiB) as daemon:
        yield daemon


@pytest.fixture
def at(shared: DaemonProcess) -> dict[str, str]:
    """An environment in which the command finds the `shared` daemon."""
    return {"KVSTORE_SOCKET_PATH": str(shared.socket_path)}
