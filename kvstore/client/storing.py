"""batch_set, one sub-batch: reserve, copy, and commit in runs while the copying goes on.

A commit is sent as soon as a run of chunks is copied and its answer fetched later: the daemon starts writing them to
SSD meanwhile, and is awake when the last commit comes, whose answer is the only one that is waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.client.connection import DeadlineMissed
from kvstore.client.copying import Copier, Target
from kvstore.client.loading import Call, Shape, check_answer, check_slots
from kvstore.codes import Ack
from kvstore.errors import Unavailable
from kvstore.units import MiB
from kvstore.wire.messages import Abort, Commit, Committed, Reserve, Reserved

COMMIT_BYTES = 16 * MiB
"""Bytes before the first commit; every further run is twice as long as the one before, up to MOST_COMMIT_BYTES: a disk
takes at least twice as long as a copy, so it stays busy, and each request costs the daemon a wake-up."""
MOST_COMMIT_BYTES = 32 * MiB
LAST_APART_BYTES = MiB // 4
"""From this size on the last chunk of a batch is committed by itself."""
MAX_COMMITS = 32
"""Unanswered at a time: half of what the daemon admits on a connection."""
_EXISTS = bytes([Ack.EXISTS])
_GRANTED = int(Ack.GRANTED)
"""A plain int: a look into an enumeration costs as much as a numpy operation."""


def store(
    call: Call,
    shape: Shape,
    shard: int,
    keys: Sequence[bytes],
    parents: Sequence[bytes],
    sources: Sequence[Target],
    copier: Copier,
    codes: bytearray,
    *,
    durable_s: float | None,
    hold: bool,
) -> None:
    """Fill `codes` (all UNANSWERED), as far as it comes.

    durable_s: more time for the answers, where they are to mean SSD. hold: keep what is stored in DRAM until the caller
    ends the reservation, which is added to `call.held`.

    Raises DeadlineMissed, Unavailable or the daemon's error; codes that are still UNANSWERED or GRANTED then are its
    consequence. What was granted is committed or given back in any case.
    """
    durable = durable_s is not None
    request = Reserve(call.root, shape.pool, shard, b"".join(keys), b"".join(parents), durable)
    reserved = call.ask(request, Reserved)
    check_answer(call, reserved.codes, reserved.offsets, len(keys))
    codes[:] = reserved.codes
    if reserved.reservation:
        if hold:
            call.held.append(reserved.reservation)
        _copy_and_commit(call, shape, reserved, sources, copier, codes, durable_s, hold)


def _copy_and_commit(
    call: Call,
    shape: Shape,
    reserved: Reserved,
    sources: Sequence[Target],
    copier: Copier,
    codes: bytearray,
    durable_s: float | None,
    hold: bool,
) -> None:
    connection = call.connection
    slots, kept = slot_addresses(call, shape, reserved)
    under_way: deque[tuple[int, int, int]] = deque()
    patience_s = call.patience_s + (durable_s or 0.0)
    whole = False
    try:
        wanted = reserved.codes if durable_s is None else reserved.codes.replace(_EXISTS, bytes([_GRANTED]))
        for first, count in commit_runs(wanted, shape.size_bytes):
            if call.link.dead:
                raise Unavailable(call.link.reason)
            run_slots, run_sources = slots[first : first + count], sources[first : first + count]
            run_codes = reserved.codes[first : first + count]
            if run_codes.count(_GRANTED) < count:
                run_slots = [slot for slot, code in zip(run_slots, run_codes, strict=True) if code == _GRANTED]
                run_sources = [source for source, code in zip(run_sources, run_codes, strict=True) if code == _GRANTED]
            if copier.fill_slots(run_slots, run_sources, shape.size_bytes, call.copies_until_s) < len(run_slots):
                raise DeadlineMissed("the copy", 0.0)
            commit = Commit(reserved.reservation, first, count, durable_s is not None, hold)
            under_way.append((connection.start(commit), first, count))
            if len(under_way) > MAX_COMMITS:
                _finish(call, under_way, codes, patience_s)
        while under_way:
            _finish(call, under_way, codes, patience_s)
        whole = True
    finally:
        if not whole and not connection.broken:
            connection.post(Abort(reserved.reservation))
        del kept


def _finish(call: Call, under_way: deque[tuple[int, int, int]], codes: bytearray, patience_s: float) -> None:
    request, first, count = under_way.popleft()
    committed = call.connection.finish(request, Committed, time.monotonic() + patience_s)
    if len(committed.codes) != count:
        call.connection.broken = True
        raise Unavailable("the daemon's answer does not fit the request")
    codes[first : first + count] = committed.codes


def slot_addresses(call: Call, shape: Shape, reserved: Reserved) -> tuple[list[int], object]:
    """Addresses of the shard in each slot (meaningless where nothing was granted), and what keeps them mapped."""
    mapping = call.link.mapping
    kept = mapping.array
    address = mapping.address
    offsets = np.frombuffer(reserved.offsets, "<i8")
    if reserved.codes.count(_GRANTED) < len(offsets):
        offsets = np.where(np.frombuffer(reserved.codes, np.uint8) == _GRANTED, offsets, 0)
    check_slots(call, offsets, shape.slot_bytes)
    if not address:
        raise Unavailable("the arena was unmapped")
    return (offsets + (address + shape.offset_bytes)).tolist(), kept


def commit_runs(codes: bytes, size_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, count) of runs that together hold every GRANTED key, of growing length.

    A last chunk that takes a while to copy is a run of its own: the daemon has then just been awake, with the others,
    when the commit comes that is waited for.
    """
    limit_bytes = COMMIT_BYTES
    last = codes.rfind(_GRANTED)
    early = last - 1 if size_bytes >= LAST_APART_BYTES else last
    first = granted = 0
    for i, code in enumerate(codes):
        granted += code == _GRANTED
        if granted and (granted * size_bytes >= limit_bytes or i >= early):
            yield first, i + 1 - first
            first, granted = i + 1, 0
            limit_bytes = min(2 * limit_bytes, MOST_COMMIT_BYTES)
        if i >= last:
            break
