"""Chunks for tests: page-aligned buffers, payloads that are a function of the identity, items with places."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence

import xxhash

from kvstore.backend import Item
from kvstore.layout import PartRow, PoolSpec, SlotLayout, one_part_pool, slot_layout
from kvstore.units import KiB

ROOT = bytes(range(32))


def aligned(size_bytes: int) -> memoryview:
    """Zeroed, writable, 4 KiB-aligned memory, freed with its last view."""
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def layout_of(size_bytes: int) -> SlotLayout:
    """One shard, one part."""
    return slot_layout(one_part_pool(size_bytes))


def grouped_layout(shards: int = 2, parts: int = 4, part_bytes: int = 512 * KiB) -> SlotLayout:
    """Several shards whose parts form several groups."""
    rows = tuple(
        PartRow(shard, part * part_bytes, part_bytes, first_layer=part, last_layer=part)
        for shard in range(shards)
        for part in range(parts)
    )
    return slot_layout(PoolSpec(parts=rows))


def make_key(number: int, seed: int = 0) -> bytes:
    return xxhash.xxh3_128_digest(f"{seed}/{number}".encode()) * 2


def payload_of(item: Item) -> bytes:
    """What the tests store under an item: differs for any two identities."""
    name = int.from_bytes(xxhash.xxh3_64_digest(item.root + item.key + item.pool.to_bytes(4, "little")), "big")
    return random.Random(name).randbytes(item.layout.slot_bytes)


def filled(items: Sequence[Item]) -> list[memoryview]:
    """One buffer an item, holding its payload."""
    buffers = []
    for item in items:
        buffer = aligned(item.layout.slot_bytes)
        buffer[:] = payload_of(item)
        buffers.append(buffer)
    return buffers
