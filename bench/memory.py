"""Caller memory as an engine has it, the plain copy that everything is compared with, and huge pages for a run."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.units import MiB

HUGE_PAGE_BYTES = 2 * MiB
_POOL = Path("/proc/sys/vm/nr_hugepages")
_ON_DEMAND = Path("/proc/sys/vm/nr_overcommit_hugepages")
Bytes = npt.NDArray[np.uint8]


class Rotation:
    """Equal pieces of memory, handed out in turns, so that none is found in the processor's cache."""

    def __init__(self, pieces: Sequence[Bytes]) -> None:
        self.pieces = list(pieces)
        self._at = 0

    @classmethod
    def over(cls, array: Bytes, piece_bytes: int) -> Rotation:
        """The pieces of one large array."""
        return cls([array[end - piece_bytes : end] for end in range(piece_bytes, len(array) + 1, piece_bytes)])

    def next(self, count: int) -> list[Bytes]:
        """The next `count` neighbours; starts again where no more than a part of them is left."""
        if self._at + count > len(self.pieces):
            self._at = 0
        self._at += count
        return self.pieces[self._at - count : self._at]


def private_memory(size_bytes: int, fill: int = 0x5A) -> Bytes:
    """Private, pre-faulted memory as an engine has it, on transparent huge pages where the system has them."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = fill
    return array


def copy_s(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> float:
    """Seconds of one plain copy, piece by piece, by one thread."""
    pairs = [(t.ctypes.data, s.ctypes.data, s.nbytes) for t, s in zip(targets, sources, strict=True)]
    start_s = time.perf_counter()
    for target, source, size_bytes in pairs:
        ctypes.memmove(target, source, size_bytes)
    return time.perf_counter() - start_s


@contextmanager
def huge_pages(size_bytes: int, say: Callable[[str], None]) -> Iterator[bool]:
    """Reserve huge pages on top of those in use, if root; restored at the end. Yields whether they were had.

    As many may be taken on demand besides, should another process take some of the reserved ones.
    """
    if os.geteuid() != 0:
        say("not root: no huge pages are reserved; both sides run on 4 KiB pages")
        yield False
        return
    pages = -(-size_bytes // HUGE_PAGE_BYTES)
    before = {path: path.read_text() for path in (_POOL, _ON_DEMAND)}
    try:
        for path, text in before.items():
            path.write_text(str(int(text) + pages))
        got = int(_POOL.read_text()) - int(before[_POOL])
        if got < pages:
            say(f"only {got} of {pages} huge pages were to be had: both sides run on 4 KiB pages")
            _restore(before)
        yield got >= pages
    finally:
        _restore(before)


def _restore(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        path.write_text(text)
