"""Which blocks make which chunks: from block tables and token counts to what is loaded and saved. Pure.

One cache group with full attention. A chunk is `blocks_per_chunk` consecutive blocks of the table, whole or not at all;
its key is the hash of its last block, which covers every token before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.keys import NO_PARENT
from kvstore.units import MiB

MOST_CHUNK_TOKENS = 256
"""Tails below a chunk are not stored: chunks of small models do not grow beyond this to reach LEAST_CHUNK_BYTES."""
LEAST_CHUNK_BYTES = MiB
"""A rank's bytes of a chunk: below this the cost of a chunk shows in look-ups and in SSD requests."""
NULL_BLOCK = 0
"""The engine's place holder; never read or written."""


@dataclass(frozen=True, slots=True)
class Geometry:
    block_tokens: int
    blocks_per_chunk: int
    hashes_per_block: int = 1

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """Blocks of the engine for a range of one chunk."""

    chunk: int
    """Number of the chunk in its chain."""
    first: int
    """The chunk's block that `blocks` start with."""
    blocks: tuple[int, ...]


def blocks_per_chunk(block_tokens: int, block_bytes: int, wanted_tokens: int | None = None) -> int:
    """wanted_tokens: what the user asked for, a multiple of block_tokens (else ValueError); None: see the constants.

    block_bytes: of one block over all layers, on one rank.
    """
    if wanted_tokens is not None:
        if wanted_tokens < block_tokens or wanted_tokens % block_tokens:
            raise ValueError(f"chunk_tokens must be a multiple of the engine's block of {block_tokens} tokens")
        return wanted_tokens // block_tokens
    enough = -(-LEAST_CHUNK_BYTES // block_bytes)
    return max(1, min(enough, MOST_CHUNK_TOKENS // block_tokens))


def chunk_keys(geometry: Geometry, hashes: Sequence[bytes], start: int, end: int) -> tuple[bytes, ...]:
    """Keys of chunks start..end-1, all of which have their hash."""
    step = geometry.blocks_per_chunk * geometry.hashes_per_block
    return tuple(bytes(hashes[(chunk + 1) * step - 1]) for chunk in range(start, end))


def parent_key(geometry: Geometry, hashes: Sequence[bytes], chunk: int) -> bytes:
    return chunk_keys(geometry, hashes, chunk - 1, chunk)[0] if chunk else NO_PARENT


def whole_chunks(geometry: Geometry, tokens: int, hashes: int) -> int:
    """How many leading chunks have all their tokens among the first `tokens`, and their hash."""
    return min(
        max(tokens, 0) // geometry.chunk_tokens, hashes // (geometry.blocks_per_chunk * geometry.hashes_per_block)
    )


def plan_load(geometry: Geometry, table: Sequence[int], local_tokens: int, tokens: int) -> tuple[ChunkBlocks, ...]:
    """What to load so that tokens local_tokens..local_tokens+tokens-1 are there, and nothing before them.

    local_tokens: what the engine has itself, a multiple of its block: those blocks may be shared and are not touched.
    Raises ValueError where that is no multiple, the table is too short or names the null block.
    """
    if local_tokens % geometry.block_tokens:
        raise ValueError(f"a local hit of {local_tokens} tokens ends inside of a block")
    return _cut(
        geometry, table, local_tokens // geometry.block_tokens, -(-(local_tokens + tokens) // geometry.block_tokens)
    )


def plan_save(geometry: Geometry, table: Sequence[int], start: int, end: int) -> tuple[ChunkBlocks, ...]:
    """The blocks of chunks start..end-1. Raises as `plan_load`."""
    return _cut(geometry, table, start * geometry.blocks_per_chunk, end * geometry.blocks_per_chunk)


def _cut(geometry: Geometry, table: Sequence[int], first: int, end: int) -> tuple[ChunkBlocks, ...]:
    """Blocks first..end-1 of a table, chunk by chunk."""
    if end > len(table):
        raise ValueError(f"the table has {len(table)} blocks, {end} are needed")
    if NULL_BLOCK in table[first:end]:
        raise ValueError("the table names the null block")
    size = geometry.blocks_per_chunk
    pieces = []
    while first < end:
        stop = min(end, (first // size + 1) * size)
        pieces.append(ChunkBlocks(first // size, first % size, tuple(table[first:stop])))
        first = stop
    return tuple(pieces)
