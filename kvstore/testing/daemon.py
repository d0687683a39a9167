"""A real daemon process on private sockets and folders, for tests, benchmarks and the demonstration.

Not covered: what the daemon answers (use `kvstore.client`), and systemd. The process is killed, never only asked, when
the object is left: nothing survives a failed test.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from kvstore.errors import Unavailable
from kvstore.units import MiB

_SUN_PATH_BYTES = 108
"""Longest AF_UNIX path (unix(7)); folders of test runners come near it, so sockets get a short folder of their own."""
_POLL_S = 0.005


class DaemonProcess:
    """`kvstore serve` with a configuration of its own. Not thread-safe. Usable again after `kill` or `stop`.

    folder: holds configuration, log and (below `ssd/`) the volume; kept by the caller. A restart finds the same volume.
    ssd_bytes: cap of the volume, 0 for none. settings: further `{"section.name": value}`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        arena_bytes: int = 256 * MiB,
        ssd_bytes: int = 512 * MiB,
        settings: Mapping[str, str | int | float] | None = None,
        nice: int = 0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ssd_path = folder / "ssd"
        self.log_path = folder / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._nice = nice
        self._sockets = Path(tempfile.mkdtemp(prefix="kvs-"))
        self.socket_path = self._sockets / "kvstore.sock"
        self.admin_path = self._sockets / "admin.sock"
        assert len(os.fsencode(self.socket_path)) < _SUN_PATH_BYTES
        values: dict[str, str | int | float | list[str]] = {
            "arena.size": arena_bytes,
            "socket.path": str(self.socket_path),
            "ssd.paths": [str(self.ssd_path)] if ssd_bytes else [],
            **({"ssd.size": ssd_bytes, "ssd.free_space_floor": 0} if ssd_bytes else {}),
            **(settings or {}),
        }
        self.config_path = folder / "kvstore.toml"
        self.config_path.write_text(_toml(values))

    @property
    def pid(self) -> int:
        assert self.process is not None, "the daemon was never started"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, timeout_s: float = 60.0) -> DaemonProcess:
        """Start and wait until the socket accepts. Raises Unavailable with the end of the log where it does not."""
        assert not self.running, "the daemon runs already"
        command = [str(Path(sys.executable).with_name("kvstore")), "serve", "--config", str(self.config_path)]
        if self._nice:
            command = ["nice", "-n", str(self._nice), *command]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )
        deadline_s = time.monotonic() + timeout_s
        while not self._accepts():
            if not self.running:
                raise Unavailable(f"the daemon ended with {self.process.returncode}:\n{self.log_tail()}")
            if time.monotonic() > deadline_s:
                self.kill()
                raise Unavailable(f"the daemon did not serve within {timeout_s:.0f} s:\n{self.log_tail()}")
            time.sleep(_POLL_S)
        return self

    def kill(self) -> None:
        """SIGKILL, as a crash: nothing is flushed. Idempotent; returns once the process is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM and wait for the drain; returns the exit status. Raises subprocess.TimeoutExpired."""
        assert self.process is not None, "the daemon was never started"
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def log_tail(self, characters: int = 4000) -> str:
        return self.log_path.read_text(errors="replace")[-characters:]

    def close(self) -> None:
        """Kill the process and remove its sockets; the folder stays."""
        self.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def __enter__(self) -> DaemonProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.socket_path))
            except (FileNotFoundError, ConnectionRefusedError):
                return False
        return True


def _toml(values: Mapping[str, str | int | float | list[str]]) -> str:
    """Flat `section.name` settings as TOML: dotted keys are tables."""
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in values.items())


def _toml_value(value: str | int | float | list[str]) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)
