"""Blocks that are kept from the engine's allocator until every rank has copied them. Pure, apart from vLLM's pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.connectors.vllm.work import SaveJob


@dataclass(slots=True)
class _Hold:
    blocks: list[Any]
    missing: int
    """Ranks that have not acknowledged."""


class Holds:
    def __init__(self, ranks: int, share: float) -> None:
        """share: most of the pool that may be held at a time."""
        self.pool: Any = None
        """vLLM's BlockPool; nothing is held before it is set."""
        self._ranks = ranks
        self._share = share
        self._holds: dict[int, _Hold] = {}
        self._jobs: list[SaveJob] = []
        self._next = 1
        self._held = 0

    @property
    def busy(self) -> bool:
        return bool(self._holds)

    @property
    def held_blocks(self) -> int:
        return self._held

    def room_chunks(self, blocks_per_chunk: int, wanted: int) -> int:
        """How many of `wanted` chunks may be held now."""
        if self.pool is None:
            return 0
        free = int(self.pool.num_gpu_blocks * self._share) - self._held
        return max(0, min(wanted, free // blocks_per_chunk))

    def add(self, make: Callable[[int], SaveJob]) -> None:
        """Hold the blocks of a new job, whose number `make` is given."""
        job = make(self._next)
        self._next += 1
        blocks = [self.pool.blocks[block] for piece in job.pieces for block in piece.blocks]
        self.pool.touch(blocks)
        self._held += len(blocks)
        self._holds[job.number] = _Hold(blocks, self._ranks)
        self._jobs.append(job)

    def take_jobs(self) -> tuple[SaveJob, ...]:
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def acknowledge(self, saved: Mapping[int, int]) -> None:
        """saved: jobs, and how many more ranks do not read their blocks any longer."""
        for number, ranks in saved.items():
            hold = self._holds.get(number)
            if hold is None:
                continue
            hold.missing -= ranks
            if hold.missing <= 0:
                del self._holds[number]
                self._held -= len(hold.blocks)
                self.pool.free_blocks(reversed(hold.blocks))  # the chain's end is evicted first
