"""What must never come back: purged roots and removed keys, in a small append-only file that outlives the index.

A removed key needs one because an older copy of it may still lie in a recycled place (evictions leave headers alone).
Appends are synced before they return. A torn tail was never acknowledged and is cut off. Thread-safe.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore.backends.ssd.files import replace_file, sync_folder
from kvstore.backends.ssd.formats import (
    KIND_KEY,
    KIND_ROOT,
    TOMBSTONE_BYTES,
    Tombstone,
    pack_tombstone,
    unpack_tombstone,
)

KEPT_KEYS = 65536
"""Removed keys remembered across starts. At each start their copies known to the index are wiped on disk; only a copy
that the index lost in a power cut needs the memory, so an old one may go (6 MiB at most)."""


class Tombstones:
    """Raises OSError, which the volume maps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.damaged = 0
        """Whole records of the file that failed their checksum."""
        self.roots: dict[bytes, int] = {}
        """root -> every record below this sequence is dead."""
        self.keys: dict[tuple[bytes, int, bytes], int] = {}
        """(root, pool, key) -> every record up to this sequence is dead."""
        fresh = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            if fresh:
                sync_folder(path.parent)
            self._load()
        except OSError:
            os.close(self._fd)
            raise

    def _load(self) -> None:
        content = self._path.read_bytes()
        for start in range(0, len(content) - TOMBSTONE_BYTES + 1, TOMBSTONE_BYTES):
            stone = unpack_tombstone(content[start : start + TOMBSTONE_BYTES])
            if stone is None:
                self.damaged += 1
            else:
                self._note(stone)
        self._end = len(content) // TOMBSTONE_BYTES * TOMBSTONE_BYTES

    def _note(self, stone: Tombstone) -> None:
        if stone.kind == KIND_ROOT:
            self.roots[stone.root] = max(stone.sequence, self.roots.get(stone.root, 0))
        elif stone.kind == KIND_KEY:
            identity = (stone.root, stone.pool, stone.key)
            self.keys[identity] = max(stone.sequence, self.keys.get(identity, 0))

    def append(self, stones: Sequence[Tombstone]) -> None:
        """Durable on return."""
        if not stones:
            return
        content = b"".join(map(pack_tombstone, stones))
        with self._lock:
            if os.pwrite(self._fd, content, self._end) != len(content):
                raise OSError(28, "No space left on device")
            os.fdatasync(self._fd)
            self._end += len(content)
            for stone in stones:
                self._note(stone)

    def compact(self) -> None:
        """Keep all roots and the last KEPT_KEYS keys. Called at start, after their copies were wiped."""
        if len(self.keys) <= KEPT_KEYS and self._end < 4 * TOMBSTONE_BYTES * (len(self.keys) + len(self.roots) + 64):
            return
        with self._lock:
            self.keys = dict(list(self.keys.items())[-KEPT_KEYS:])
            stones = [Tombstone(KIND_ROOT, root, sequence) for root, sequence in self.roots.items()]
            stones += [Tombstone(KIND_KEY, r, sequence, pool, key) for (r, pool, key), sequence in self.keys.items()]
            replace_file(self._path, b"".join(map(pack_tombstone, stones)))
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            os.close(self._fd)
            self._fd = fd
            self._end = len(stones) * TOMBSTONE_BYTES

    def max_sequence(self) -> int:
        return max(max(self.roots.values(), default=0), max(self.keys.values(), default=0))

    def kills(self, root: bytes, pool: int, key: bytes, sequence: int) -> bool:
        return sequence < self.roots.get(root, 0) or sequence <= self.keys.get((root, pool, key), -1)

    def close(self) -> None:
        os.close(self._fd)
