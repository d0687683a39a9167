"""batch_get, one sub-batch: lease, copy what is there, wait for what is being filled, look at the generations, release.

The generations are looked at once before and once after all copies, in two vector operations: a generation never
returns to an old value, so one that is right at the end was right during every copy in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.arena import FAILED
from kvstore.client.connection import Connection
from kvstore.client.copying import Copier, Target
from kvstore.client.link import Link
from kvstore.client.outcomes import UNANSWERED
from kvstore.codes import Load
from kvstore.errors import Unavailable
from kvstore.units import PAGE_BYTES
from kvstore.wire.messages import Lease, Leased, Release

WAIT_SLICE_S = 0.001
"""Longest wait for one chunk before looking at all that are awaited again, and whether the daemon lives."""
# Plain ints: a look into an enumeration costs as much as a numpy operation.
_DRAM, _FIRST_MISS, _STALE, _LATE = map(int, (Load.DRAM, Load.MISS_UNKNOWN, Load.MISS_STALE, Load.MISS_DEADLINE))
_PAGE_SHIFT = PAGE_BYTES.bit_length() - 1
_IN_PAGE = PAGE_BYTES - 1


@dataclass(slots=True)
class Call:
    """What a call has in its hands: a connection of a link, its root's handle there, and until when."""

    link: Link
    connection: Connection
    root: int
    deadline_s: float
    held: list[int] = field(default_factory=list)
    """Reservations whose chunks stay pinned until the whole batch is acknowledged."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One shard of one pool, as copies need it."""

    pool: int
    offset_bytes: int
    """Of the shard in its slot."""
    size_bytes: int
    parts: int
    slot_bytes: int


def load(
    call: Call, shape: Shape, keys: Sequence[bytes], targets: Sequence[Target], copier: Copier, codes: bytearray
) -> None:
    """Fill `codes` (all UNANSWERED), as far as it comes. No byte of `targets` is touched after the return.

    Raises DeadlineMissed, Unavailable or the daemon's error; codes that are still UNANSWERED then are its consequence.
    """
    start_s = time.monotonic()
    request = Lease(call.root, shape.pool, b"".join(keys))
    leased = call.connection.call(request, Leased, call.deadline_s)
    check_answer(call, leased.codes, leased.offsets, len(keys))
    check_answer(call, leased.codes, leased.generations, len(keys))
    if not leased.lease:
        codes[:] = leased.codes
        return
    copied = 0
    try:
        copied = _Loading(call, shape, leased, targets, copier).run(codes)
    finally:
        call.connection.post(Release(leased.lease, copied * shape.size_bytes, time.monotonic() - start_s))


class _Loading:
    def __init__(self, call: Call, shape: Shape, leased: Leased, targets: Sequence[Target], copier: Copier) -> None:
        mapping = call.link.mapping
        self._kept = mapping.array
        """Keeps the memory mapped while addresses into it are used."""
        self._address = mapping.address
        if not self._address:
            raise Unavailable("the arena was unmapped")
        self._call = call
        self._shape = shape
        self._leased = leased
        self._targets = targets
        self._copier = copier
        self._generations = mapping.generations
        self._parts_ready = mapping.parts_ready

    def run(self, codes: bytearray) -> int:
        """Returns how many chunks were copied whole and right."""
        leased, count = self._leased, len(codes)
        codes[:] = leased.codes
        resident = codes.count(_DRAM)
        offsets = np.frombuffer(leased.offsets, "<i8")
        granted = np.frombuffer(leased.generations, "<u8")
        if resident == count:
            hits = None
        else:
            hits = np.frombuffer(leased.codes, np.uint8) < _FIRST_MISS
            offsets = np.where(hits, offsets, 0)
        if (
            offsets.min() < 0
            or offsets.max() > self._call.link.mapping.arena_bytes - self._shape.slot_bytes
            or np.bitwise_or.reduce(offsets) & _IN_PAGE
        ):
            self._call.connection.broken = True
            raise Unavailable("the daemon granted a slot outside of the arena")
        self._pages = pages = offsets >> _PAGE_SHIFT
        self._slots: list[int] = (offsets + (self._address + self._shape.offset_bytes)).tolist()
        if hits is None and self._generations.take(pages).tobytes() == leased.generations:
            done = self._copy(range(count), codes)
        else:
            done = self._copy_some(granted, codes)
        if len(done) == count and self._generations.take(pages).tobytes() == leased.generations:
            return count
        torn = [i for i in done if self._generations[pages[i]] != granted[i]]
        for i in torn:
            codes[i] = _STALE
        return len(done) - len(torn)

    def _copy_some(self, granted: npt.NDArray[np.uint64], codes: bytearray) -> Sequence[int]:
        """Where not all are resident and current: what is ready first, then the others as they come."""
        current = (self._generations[self._pages] == granted).tolist()
        resident, waiting = [], []
        for i, code in enumerate(self._leased.codes):
            if code >= _FIRST_MISS:
                continue
            if not current[i]:
                codes[i] = _STALE
            elif code == _DRAM:
                resident.append(i)
            else:
                waiting.append(i)
        done = list(self._copy(resident, codes))
        if waiting:
            done += self._await(waiting, granted, codes)
        return done

    def _copy(self, indexes: Sequence[int], codes: bytearray) -> Sequence[int]:
        """Returns those that were copied; the rest is MISS_DEADLINE."""
        slots: Sequence[int] = self._slots
        targets = self._targets
        if len(indexes) < len(slots):
            slots, targets = [slots[i] for i in indexes], [targets[i] for i in indexes]
        done = self._copier.fill_targets(slots, targets, self._shape.size_bytes, self._call.deadline_s)
        for i in indexes[done:]:
            codes[i] = _LATE
        return indexes[:done]

    def _await(self, waiting: list[int], granted: npt.NDArray[np.uint64], codes: bytearray) -> list[int]:
        """Copy what is ready, wait for the first that is not, look again."""
        wait_parts = self._call.link.mapping.wait_parts
        need = self._shape.parts
        done: list[int] = []
        while waiting:
            values: npt.NDArray[Any] = self._parts_ready[self._pages[waiting]]
            ready = [i for i, value in zip(waiting, values.tolist(), strict=True) if value >= need]
            if ready:
                failed = {i for i, value in zip(waiting, values.tolist(), strict=True) if value == FAILED}
                for i in failed:
                    codes[i] = Load.MISS_IO
                done += self._copy([i for i in ready if i not in failed], codes)
                waiting = [i for i in waiting if i not in set(ready)]
                continue
            now_s = time.monotonic()
            if now_s >= self._call.deadline_s or self._call.link.dead:
                code = Load.MISS_UNAVAILABLE if self._call.link.dead else Load.MISS_DEADLINE
                for i in waiting:
                    codes[i] = code
                break
            first = waiting[0]
            page, generation = int(self._pages[first]), int(granted[first])
            until_s = min(self._call.deadline_s, now_s + WAIT_SLICE_S)
            value = wait_parts(page, generation, need, until_s)
            if value < need and self._generations[page] != generation:
                codes[first] = Load.MISS_STALE
                del waiting[0]
        return done


def check_answer(call: Call, codes: bytes, words: bytes, count: int) -> None:
    """Raises Unavailable, and ends the connection, where an answer is not one a key."""
    if len(codes) != count or len(words) != 8 * count or UNANSWERED in codes:
        call.connection.broken = True
        raise Unavailable("the daemon's answer does not fit the request")
