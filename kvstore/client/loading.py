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
        address = mapping.address
        if not address:
            raise Unavailable("the arena was unmapped")
        self._call = call
        self._shape = shape
        self._targets = targets
        self._copier = copier
        self._answers = np.frombuffer(leased.codes, np.uint8)
        self._granted = np.frombuffer(leased.generations, "<u8")
        offsets = np.frombuffer(leased.offsets, "<u8")
        hits = self._answers < Load.MISS_UNKNOWN
        granted = offsets[hits]
        if granted.size and (granted.max() > mapping.arena_bytes - shape.slot_bytes or (granted % PAGE_BYTES).any()):
            call.connection.broken = True
            raise Unavailable("the daemon granted a slot outside of the arena")
        self._pages = np.where(hits, offsets // PAGE_BYTES, 0).astype(np.intp)
        self._slots: list[int] = (offsets + np.uint64(address + shape.offset_bytes)).tolist()
        self._generations = mapping.generations
        self._parts_ready = mapping.parts_ready

    def run(self, codes: bytearray) -> int:
        """Returns how many chunks were copied whole and right."""
        answers = self._answers
        current = self._generations[self._pages] == self._granted
        codes[:] = bytes(answers)
        hits = answers < Load.MISS_UNKNOWN
        if not current.all():
            for i in np.flatnonzero(hits & ~current).tolist():
                codes[i] = Load.MISS_STALE
            hits &= current
        done = self._copy(np.flatnonzero(hits & (answers == Load.DRAM)).tolist(), codes)
        waiting = np.flatnonzero(hits & (answers != Load.DRAM)).tolist()
        if waiting:
            done += self._await(waiting, codes)
        copied = np.array(done, np.intp)
        torn = copied[self._generations[self._pages[copied]] != self._granted[copied]]
        for i in torn.tolist():
            codes[i] = Load.MISS_STALE
        return len(done) - len(torn)

    def _copy(self, indexes: list[int], codes: bytearray) -> list[int]:
        """Returns those that were copied; the rest is MISS_DEADLINE."""
        if len(indexes) == len(self._slots):
            slots, targets = self._slots, self._targets
        else:
            slots, targets = [self._slots[i] for i in indexes], [self._targets[i] for i in indexes]
        done = self._copier.fill_targets(slots, targets, self._shape.size_bytes, self._call.deadline_s)
        for i in indexes[done:]:
            codes[i] = Load.MISS_DEADLINE
        return indexes[:done]

    def _await(self, waiting: list[int], codes: bytearray) -> list[int]:
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
            page, generation = int(self._pages[first]), int(self._granted[first])
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
