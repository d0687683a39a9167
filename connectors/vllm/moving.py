"""One job of one rank: chunks from the daemon's arena into the engine's blocks, or the other way. Knows no vLLM.

Called on transfer threads. Never raises because of the daemon: what could not be loaded is named, what could not be
saved is counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from kvstore.client.root import Root
from kvstore.codes import Ack, Load
from kvstore.connectors.transfer import Copier
from kvstore.connectors.vllm.plan import ChunkBlocks
from kvstore.connectors.vllm.work import LoadJob, SaveJob
from kvstore.units import MiB

WINDOW_BYTES = 64 * MiB
"""Chunks that are leased or reserved together: a job does not pin more of the arena than this at a time."""
LOAD_BASE_S = 0.1
LOAD_BYTES_PER_S = 0.25e9
"""A load that is slower than this (plus the base) is given up: recomputing is not slower then."""


def load(
    root: Root, copier: Copier, job: LoadJob, mark: object, shard: int, stop: Callable[[], bool], counts: Counter[str]
) -> set[int]:
    """Fill the job's blocks; returns those that do not hold what they should. No block is written after the return.

    stop: asked between chunks; where it says True the rest counts as not loaded.
    """
    if len(job.keys) != len(job.pieces):
        return job.blocks
    size = root.layout.shard_bytes[shard]
    deadline_s = time.monotonic() + LOAD_BASE_S + len(job.keys) * size / LOAD_BYTES_PER_S
    bad: set[int] = set()
    step = max(1, WINDOW_BYTES // root.layout.slot_bytes)
    for start in range(0, len(job.keys), step):
        window = slice(start, start + step)
        if bad or stop():  # what follows a gap is computed anyway
            bad |= {block for piece in job.pieces[window] for block in piece.blocks}
            continue
        bad |= _load_window(root, copier, job.keys[window], job.pieces[window], mark, shard, deadline_s, counts)
    counts["load_jobs_failed" if bad else "load_jobs"] += 1
    return bad


def _load_window(
    root: Root,
    copier: Copier,
    keys: tuple[bytes, ...],
    pieces: tuple[ChunkBlocks, ...],
    mark: object,
    shard: int,
    deadline_s: float,
    counts: Counter[str],
) -> set[int]:
    bad: set[int] = set()
    copied_bytes = 0
    started_s = time.monotonic()
    chunk_blocks = root.layout.shard_bytes[shard] // (copier.layers * copier.page_bytes)
    last_part = len(root.layout.part_ranges[shard]) - 1
    with root.lease(keys) as lease:
        for i, (code, piece) in enumerate(zip(lease.codes, pieces, strict=True)):
            good = not bad and code.hit
            if good and code != Load.DRAM:
                good = lease.wait(i, last_part, max(0.0, deadline_s - time.monotonic()))
            if good and lease.valid(i):
                copier.scatter(mark, lease.view(i, shard=shard), piece.first, chunk_blocks, piece.blocks)
            if good and lease.valid(i):
                moved = len(piece.blocks) * copier.layers * copier.page_bytes
                copied_bytes += moved
                counts["loaded_chunks"] += 1
                counts["loaded_bytes"] += moved
                counts["loaded_blocks"] += len(piece.blocks)
            else:
                bad.update(piece.blocks)
                counts[f"load_{code.name.lower()}" if not code.hit else "load_not_in_time_or_torn"] += 1
        lease.release(copied_bytes=copied_bytes, seconds=time.monotonic() - started_s)
    return bad


def save(root: Root, copier: Copier, job: SaveJob, mark: object, shard: int, counts: Counter[str]) -> None:
    """Store the job's chunks as far as the daemon takes them. No block is read after the return."""
    step = max(1, WINDOW_BYTES // root.layout.slot_bytes)
    for start in range(0, len(job.keys), step):
        window = slice(start, start + step)
        pieces = job.pieces[window]
        with root.reserve(job.keys[window], job.parents[window], shard=shard) as reservation:
            granted = 0
            for i, code in enumerate(reservation.codes):
                if code == Ack.GRANTED:
                    copier.gather(mark, pieces[i].blocks, reservation.view(i))
                    granted += 1
            answers = reservation.commit() if granted else reservation.codes
        size = root.layout.shard_bytes[shard]
        for answer in answers:
            counts[f"save_{answer.name.lower()}"] += 1
        counts["saved_bytes"] += size * sum(answer in _NEWLY_KEPT for answer in answers)


_NEWLY_KEPT = (Ack.STORED_DRAM, Ack.STORED_WRITE_BEHIND, Ack.STORED_SSD, Ack.PARTIAL)
