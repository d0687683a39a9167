"""A blocking connection to a socket of the daemon: one request, one answer. For tools; engines use kvstore.client."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore.cli.exit import Exit, Failure, Unreachable
from kvstore.errors import KVStoreError, from_code
from kvstore.wire import frame
from kvstore.wire.messages import (
    PROTOCOL,
    PROTOCOL_MIN,
    AdminAnswer,
    AdminCall,
    Failed,
    Hello,
    Message,
    Welcome,
)

TIMEOUT_S = 10.0
"""A daemon that is silent for this long is frozen; `flush` and `purge` wait longer."""
SLOW_VERBS = {"flush": 600.0, "purge": 600.0, "rm": 60.0}


class Connection:
    """Connects at once. Raises Unreachable where no daemon listens and Failure (denied) without permission."""

    def __init__(self, path: Path, start_command: str, timeout_s: float = TIMEOUT_S) -> None:
        self._path = path
        self._request = 0
        self._start_command = start_command
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise self._failure(error) from error

    def hello(self, label: str) -> Welcome:
        """The handshake of the data socket."""
        answer = self.ask(Hello(PROTOCOL_MIN, PROTOCOL, os.urandom(16), label, want_fds=False))
        assert isinstance(answer, Welcome), answer
        return answer

    def call(self, verb: str, **arguments: str | int | float | bool | None) -> dict[str, Any]:
        """One admin verb. Raises the daemon's typed error."""
        if verb in SLOW_VERBS:
            self._socket.settimeout(SLOW_VERBS[verb])
        answer = self.ask(AdminCall(verb, arguments))
        assert isinstance(answer, AdminAnswer), answer
        return answer.result

    def ask(self, message: Message) -> Message:
        """Send one message and wait for its answer. Raises what the daemon answered with."""
        self._request += 1
        try:
            self._socket.sendall(frame.encode(message, self._request))
            size, kind, _ = frame.decode_head(self._receive(frame.HEAD_BYTES))
            answer = frame.decode_body(kind, self._receive(size))
        except OSError as error:
            raise self._failure(error) from error
        if isinstance(answer, Failed):
            raise from_code(answer.code, answer.message)
        return answer

    def _receive(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._socket.recv(min(size, 1 << 20))
            if not part:
                raise ConnectionResetError("the daemon closed the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _failure(self, error: OSError) -> KVStoreError | Failure:
        if isinstance(error, PermissionError):
            return Failure(
                f"no permission for {self._path}", Exit.DENIED, "run it as root, as the daemon's user or in its group"
            )
        if isinstance(error, TimeoutError):
            return Unreachable(
                f"the daemon on {self._path} does not answer", "look at its log; `kill -CONT` it if it was stopped"
            )
        if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
            return Unreachable(f"no daemon runs on {self._path}", f"start one with: {self._start_command}")
        if isinstance(error, (ConnectionResetError, BrokenPipeError)):
            return Unreachable(f"the daemon on {self._path} closed the connection", "is it stopping? Look at its log")
        return Unreachable(f"{self._path}: {error.strerror or error}", f"start one with: {self._start_command}")

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
