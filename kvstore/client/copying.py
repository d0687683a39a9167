"""Callers' memory, and the one copy between it and a slot.

A buffer is a numpy array, anything with the buffer protocol (bytes, memoryview, mmap), a raw (address, length) pair of
ints, or a sequence of those: pieces that are gathered from, or scattered to, in their order. Copies run through memmove
and np.copyto, which release the GIL (slice assignment of a memoryview holds it).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.units import MiB

Buffer: TypeAlias = Any
"""See the module's docstring."""
SPLIT_BYTES = 4 * MiB
"""Below this a copy is not worth a second thread: the hand-off costs 55 us, in which one thread copies about 1 MiB."""
_memmove = ctypes.memmove
_address_of = ctypes.addressof
_byte_at: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer
Fill: TypeAlias = Callable[[Sequence[int], Sequence["Target"], int, float], int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a caller's chunk. `strided` where its bytes do not lie side by side; `address` is 0 then."""

    address: int
    length_bytes: int
    strided: npt.NDArray[Any] | None = None


Target: TypeAlias = int | list[Piece]
"""Where a chunk's bytes lie: the address of all of them, or pieces."""


class Buffers:
    """The resolved buffers of one batch; keeps alive (and, for bytearrays, unresizable) what it took addresses of."""

    def __init__(self, buffers: Sequence[Buffer], size_bytes: int, *, writable: bool) -> None:
        """Each must have `size_bytes` in all. What does not fit is in `unfit`, without an exception."""
        self._kept: list[object] = []
        self._unfit: set[int] = set()
        self.targets: list[Target] = []
        """One a buffer; meaningless where it is unfit."""
        add, keep = self.targets.append, self._kept.append
        for buffer in buffers:
            if type(buffer) is np.ndarray and buffer.nbytes == size_bytes and not buffer.dtype.hasobject:
                try:
                    add(_address_of(_byte_at(buffer)))  # three times as fast as `buffer.ctypes.data`
                except (TypeError, ValueError):  # read-only or not contiguous: the long way
                    pass
                else:
                    keep(buffer)
                    continue
            target = self._resolve(buffer, size_bytes, writable)
            if target is None:
                self._unfit.add(len(self.targets))
            add(target or 0)

    def unfit(self, count: int) -> set[int]:
        """Which of a batch of `count` have no buffer that fits."""
        return self._unfit | set(range(len(self.targets), count))

    def _resolve(self, buffer: Buffer, size_bytes: int, writable: bool) -> Target | None:
        piece = self._piece(buffer, writable)
        if piece is not None:
            pieces = [piece]
        elif isinstance(buffer, Sequence) and not isinstance(buffer, str):
            found = [self._piece(part, writable) for part in buffer]
            pieces = [part for part in found if part is not None]
            if len(pieces) < len(found):
                return None
        else:
            return None
        if sum(part.length_bytes for part in pieces) != size_bytes:
            return None
        return pieces[0].address if len(pieces) == 1 and pieces[0].strided is None else pieces

    def _piece(self, part: Buffer, writable: bool) -> Piece | None:
        if isinstance(part, tuple) and len(part) == 2 and all(isinstance(number, (int, np.integer)) for number in part):
            address, length_bytes = map(int, part)
            return Piece(address, length_bytes) if address > 0 and length_bytes > 0 else None
        array = _as_array(part)
        if array is None or array.dtype.hasobject or (writable and not array.flags.writeable):
            return None
        self._kept.append(array)
        if array.flags.c_contiguous:
            return Piece(array.ctypes.data, array.nbytes)
        return Piece(0, array.nbytes, array)


def _as_array(part: Buffer) -> npt.NDArray[Any] | None:
    if isinstance(part, np.ndarray):
        return part
    try:
        return np.frombuffer(part, np.uint8)
    except (TypeError, ValueError, AttributeError, BufferError):  # no buffer, or one that is empty or not contiguous
        return None


def fill_slots(slots: Sequence[int], sources: Sequence[Target], size_bytes: int, deadline_s: float) -> int:
    """Copy chunks into slots (addresses; the caller keeps them mapped), in order, until the deadline.

    Returns how many are done. Releases the GIL.
    """
    done, clock = 0, time.monotonic
    for slot, source in zip(slots, sources, strict=True):
        if clock() > deadline_s:
            break
        if isinstance(source, int):
            _memmove(slot, source, size_bytes)
        else:
            _gather(slot, source)
        done += 1
    return done


def fill_targets(slots: Sequence[int], targets: Sequence[Target], size_bytes: int, deadline_s: float) -> int:
    """Copy chunks out of slots, otherwise as `fill_slots`."""
    done, clock = 0, time.monotonic
    for slot, target in zip(slots, targets, strict=True):
        if clock() > deadline_s:
            break
        if isinstance(target, int):
            _memmove(target, slot, size_bytes)
        else:
            _scatter(slot, target)
        done += 1
    return done


def _gather(slot: int, pieces: list[Piece]) -> None:
    for piece in pieces:
        if piece.strided is None:
            _memmove(slot, piece.address, piece.length_bytes)
        else:
            np.copyto(_slot_like(slot, piece.strided), piece.strided)
        slot += piece.length_bytes


def _scatter(slot: int, pieces: list[Piece]) -> None:
    for piece in pieces:
        if piece.strided is None:
            _memmove(piece.address, slot, piece.length_bytes)
        else:
            np.copyto(piece.strided, _slot_like(slot, piece.strided))
        slot += piece.length_bytes


def _slot_like(slot: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The slot's bytes in the shape of `like`, whose bytes they are in C order."""
    raw: Any = (ctypes.c_ubyte * like.nbytes).from_address(slot)
    array: npt.NDArray[Any] = np.frombuffer(raw, like.dtype)
    return array.reshape(like.shape)


class Copier:
    """Copies batches, with `threads` threads in all (the caller is one). Thread-safe. `close` when unused."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "kvstore-copy") if threads > 1 else None

    def fill_slots(self, slots: Sequence[int], sources: Sequence[Target], size_bytes: int, deadline_s: float) -> int:
        """Copy into slots in order; returns how many are done: fewer than all where the deadline passed."""
        return self._run(fill_slots, slots, sources, size_bytes, deadline_s)

    def fill_targets(self, slots: Sequence[int], targets: Sequence[Target], size_bytes: int, deadline_s: float) -> int:
        """Copy out of slots in order; returns as `fill_slots`. No thread touches a target after the return."""
        return self._run(fill_targets, slots, targets, size_bytes, deadline_s)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _run(
        self, fill: Fill, slots: Sequence[int], others: Sequence[Target], size_bytes: int, deadline_s: float
    ) -> int:
        if self._pool is None or len(slots) < 2 or len(slots) * size_bytes < SPLIT_BYTES:
            return fill(slots, others, size_bytes, deadline_s)
        share = -(-len(slots) // self._threads)
        jobs = []
        try:
            for start in range(share, len(slots), share):
                end = start + share
                jobs.append(self._pool.submit(fill, slots[start:end], others[start:end], size_bytes, deadline_s))
        except RuntimeError:  # closed meanwhile: what was handed over gets done, the rest is missing
            pass
        try:
            done = fill(slots[:share], others[:share], size_bytes, deadline_s)
        finally:
            wait(jobs)
        for number, job in enumerate(jobs, 1):
            if done < number * share:
                break
            done += job.result()
        return done
