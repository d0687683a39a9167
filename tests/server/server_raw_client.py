"""A raw client: it speaks frames and nothing more, so that a test can say what a well-behaved client never would."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from kvstore.layout import one_part_pool
from kvstore.namespace import BaseNamespace, RequestIdentity
from kvstore.units import MiB
from kvstore.wire import messages as m
from kvstore.wire.frame import FrameReader, encode

WAIT_S = 10.0
"""Nothing here takes so long unless it never comes."""
CHUNK_BYTES = 1 * MiB
NAMESPACE = BaseNamespace(model="rig", weights="w1", pools=(one_part_pool(CHUNK_BYTES),))


class RawClient:
    """A blocking socket that sends and receives frames. Waits at most WAIT_S."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(os.fspath(path))  # blocking: with a time-out a full backlog would be an error
        except OSError:
            self.socket.close()
            raise
        self.socket.settimeout(WAIT_S)
        self.root = 0
        self._reader = FrameReader()
        self._frames: list[tuple[int, m.Message]] = []
        self._request = 0

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def greet(self, session: bytes | None = None, label: str = "test", quiet: bool = False) -> m.Welcome:
        answer = self.ask(m.Hello(1, 1, session or os.urandom(16), label, want_fds=False, quiet=quiet))
        assert isinstance(answer, m.Welcome), answer
        return answer

    def open_root(self) -> int:
        answer = self.ask(m.OpenRoot(NAMESPACE, RequestIdentity()))
        assert isinstance(answer, m.RootOpened), answer
        self.root = answer.root
        return answer.root

    def reserve(self, *keys: bytes) -> m.Reserved:
        parents = b"".join([bytes(32), *keys[:-1]])
        answer = self.ask(m.Reserve(self.root, 0, 0, b"".join(keys), parents))
        assert isinstance(answer, m.Reserved), answer
        return answer

    def send(self, message: m.Message) -> int:
        self._request += 1
        self.socket.sendall(encode(message, self._request))
        return self._request

    def ask(self, message: m.Message) -> m.Message:
        request = self.send(message)
        answered, answer = self.receive()
        assert answered == request
        return answer

    def receive(self) -> tuple[int, m.Message]:
        """The next answer. Raises EOFError where the server has closed."""
        while not self._frames:
            data = self._data()
            if not data:
                raise EOFError
            self._frames = list(self._reader.feed(data))
        return self._frames.pop(0)

    def closed(self) -> bool:
        """True where nothing but the end comes within WAIT_S."""
        return not self._frames and not self._data()

    def _data(self) -> bytes:
        try:
            return self.socket.recv(1 << 18)
        except ConnectionResetError:  # the server closed with requests of ours unread
            return b""
