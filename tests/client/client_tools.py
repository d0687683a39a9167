"""What the client's tests share: small namespaces, chunks whose bytes follow from their key, and the admin socket."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.client.connection import Connection
from kvstore.layout import PartRow, PoolSpec, one_part_pool
from kvstore.namespace import BaseNamespace
from kvstore.units import KiB
from kvstore.wire.frame import FrameReader, encode
from kvstore.wire.messages import AdminAnswer, AdminCall, Message

CHUNK_BYTES = 256 * KiB
Bytes = npt.NDArray[np.uint8]


def namespace(size_bytes: int = CHUNK_BYTES, **fields: Any) -> BaseNamespace:
    return BaseNamespace(model="test", weights="w", pools=(one_part_pool(size_bytes, **fields),))


def sharded_namespace(shards: int, parts: int, part_bytes: int) -> BaseNamespace:
    rows = [PartRow(shard, part * part_bytes, part_bytes) for shard in range(shards) for part in range(parts)]
    return BaseNamespace(model="test", weights="w", pools=(PoolSpec(tuple(rows)),))


def fresh_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def chunk(key: bytes, size_bytes: int = CHUNK_BYTES) -> Bytes:
    """Other bytes for every key, and other ones on every page of a chunk."""
    seed = int.from_bytes(key[:8], "little")
    return (np.arange(size_bytes // 8, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(seed)).view(np.uint8)


def chunks(keys: Sequence[bytes], size_bytes: int = CHUNK_BYTES) -> list[Bytes]:
    return [chunk(key, size_bytes) for key in keys]


def empty(count: int, size_bytes: int = CHUNK_BYTES) -> list[Bytes]:
    return [np.zeros(size_bytes, np.uint8) for _ in range(count)]


class Peer:
    """The daemon's end: what came, in order, and answers as the test wants them."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._reader = FrameReader()

    def receive(self, count: int) -> list[tuple[int, Message]]:
        got: list[tuple[int, Message]] = []
        while len(got) < count:
            data = self.socket.recv(65536)
            assert data, "the client closed the connection"
            got += self._reader.feed(data)
        return got

    def answer(self, *answers: tuple[int, Message]) -> None:
        self.socket.sendall(b"".join(encode(message, request) for request, message in answers))


def admin(path: Path, verb: str, **arguments: str | int) -> dict[str, Any]:
    """One admin verb, asked over the wire."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))
    connection = Connection(sock)
    try:
        request = AdminCall(verb, dict(arguments))
        return connection.call(request, AdminAnswer, time.monotonic() + 30).result
    finally:
        connection.close()


def eventually(true: Callable[[], bool], what: str, within_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}"
        time.sleep(0.005)
