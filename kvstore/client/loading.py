"""batch_get, one sub-batch: lease, copy what is there, wait for what is being filled, look at the generations, release.

The generations are looked at once before and once after all copies, in two vector operations: a generation never
returns to an old value, so one that is right at the end was right during every copy in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.arena import FAILED
from kvstore.client.connection import Answer, Connection
from kvstore.client.copying import Copier, Target
from kvstore.client.link import Link
from kvstore.client.outcomes import UNANSWERED
from kvstore.codes import Load
from kvstore.errors import Closed, Unavailable
from kvstore.units import PAGE_BYTES
from kvstore.wire.messages import Lease, Leased, Message, Release

WAIT_SLICE_S = 0.001
"""Longest wait for one chunk before looking at all that are awaited again, and whether the daemon lives."""
LOOK_AHEAD = 64
"""Awaited chunks that are looked at together: fills end nearly in order."""
# Plain ints: a look into an enumeration costs as much as a numpy operation.
_DRAM, _FIRST_MISS = int(Load.DRAM), int(Load.MISS_UNKNOWN)
_STALE, _LATE, _FAILED = int(Load.MISS_STALE), int(Load.MISS_DEADLINE), int(Load.MISS_IO)
_PAGE_SHIFT = PAGE_BYTES.bit_length() - 1
_IN_PAGE = PAGE_BYTES - 1


@dataclass(slots=True)
class Call:
    """What a call has in its hands: a connection of a link, its root's handle there, and until when."""

    link: Link
    connection: Connection
    root: int
    patience_s: float
    """Longest wait for the answer to one request."""
    fills_until_s: float
    """On time.monotonic()'s scale, as the next."""
    copies_until_s: float
    late: bool = False
    """Set where fills did not come in time: perhaps the daemon is frozen, which shared memory does not tell."""
    held: list[int] = field(default_factory=list)
    """Reservations whose chunks stay pinned until the whole batch is acknowledged."""

    def ask(self, message: Message, kind: type[Answer]) -> Answer:
        """Raises DeadlineMissed, Unavailable, or the error that the daemon answered."""
        return self.connection.call(message, kind, time.monotonic() + self.patience_s)


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
    leased = call.ask(request, Leased)
    check_answer(call, leased.codes, leased.offsets, len(keys))
    check_answer(call, leased.codes, leased.generations, len(keys))
    if not leased.lease:
        codes[:] = leased.codes
        return
    copied = 0
    try:
        # Hits are answered only once their copies have been found right: an error on the way leaves no false one.
        answers = bytearray(leased.codes)
        copied = _Loading(call, shape, leased, targets, copier).run(answers)
        codes[:] = answers
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
        """`codes` are those of the lease; those of chunks that were not copied, or not right, become misses.

        Returns how many chunks were copied whole and right.
        """
        leased, count = self._leased, len(codes)
        resident = codes.count(_DRAM)
        offsets = np.frombuffer(leased.offsets, "<i8")
        granted = np.frombuffer(leased.generations, "<u8")
        if resident == count:
            hits = None
        else:
            hits = np.frombuffer(leased.codes, np.uint8) < _FIRST_MISS
            offsets = np.where(hits, offsets, 0)
        check_slots(self._call, offsets, self._shape.slot_bytes)
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
        done = self._copier.fill_targets(slots, targets, self._shape.size_bytes, self._call.copies_until_s)
        for i in indexes[done:]:
            codes[i] = _LATE
        return indexes[:done]

    def _await(self, waiting: list[int], granted: npt.NDArray[np.uint64], codes: bytearray) -> list[int]:
        """Copy what is ready, wait for the first that is not, look again."""
        wait_parts = self._call.link.mapping.wait_parts
        need = self._shape.parts
        done: list[int] = []
        while waiting:
            head = waiting[:LOOK_AHEAD]
            values = self._parts_ready.take(self._pages[head]).tolist()
            ready = [i for i, value in zip(head, values, strict=True) if need <= value < FAILED]
            failed = [i for i, value in zip(head, values, strict=True) if value == FAILED]
            if ready or failed:
                for i in failed:
                    codes[i] = _FAILED
                done += self._copy(ready, codes)
                settled = {*ready, *failed}
                waiting = [i for i in head if i not in settled] + waiting[LOOK_AHEAD:]
                continue
            now_s = time.monotonic()
            if now_s >= self._call.fills_until_s or self._call.link.dead:
                break
            first = waiting[0]
            page, generation = int(self._pages[first]), int(granted[first])
            until_s = min(self._call.fills_until_s, now_s + WAIT_SLICE_S)
            try:
                value = wait_parts(page, generation, need, until_s)
            except Closed:  # the daemon is gone, and the background thread was quicker
                break
            if value < need and self._generations[page] != generation:
                codes[first] = _STALE
                del waiting[0]
        for i in waiting:
            codes[i] = Load.MISS_UNAVAILABLE if self._call.link.dead else Load.MISS_DEADLINE
        if waiting and not self._call.link.dead:
            self._call.late = True
        return done


def check_answer(call: Call, codes: bytes, words: bytes, count: int) -> None:
    """Raises Unavailable, and ends the connection, where an answer is not one a key."""
    if len(codes) != count or len(words) != 8 * count or UNANSWERED in codes:
        call.connection.broken = True
        raise Unavailable("the daemon's answer does not fit the request")


def check_slots(call: Call, offsets: npt.NDArray[np.int64], slot_bytes: int) -> None:
    """Raises Unavailable, and ends the connection, where one of these slots is no place in the arena."""
    if offsets.size and (
        offsets.min() < 0
        or offsets.max() > call.link.mapping.arena_bytes - slot_bytes
        or np.bitwise_or.reduce(offsets) & _IN_PAGE
    ):
        call.connection.broken = True
        raise Unavailable("the daemon granted a slot outside of the arena")
