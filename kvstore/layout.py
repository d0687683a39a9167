"""The shape of a chunk: pools, part tables, and the slot that holds one chunk.

A chunk takes ONE slot: its shards lie one after another, each starting on a 4 KiB page, so that a chunk is reserved,
evicted, written and read as a whole (docs/decisions/0001). A part (a layer, or several) is a contiguous range inside a
shard. Parts are checksummed and read in groups of at least 512 KiB, so a record never needs more than MAX_EXTENTS sums.
Pure; immutable; thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvstore.errors import Invalid
from kvstore.units import PAGE_BYTES, KiB, format_size, round_up

MAX_SHARDS = 64
MAX_PARTS = 4096
MAX_EXTENTS = 120
"""Checksums of 16 bytes and lengths of 8 that fit beside the identity in a 4 KiB record header."""
GROUP_BYTES = 512 * KiB
"""Below this a read costs the device more in requests than it saves in waiting (architecture, SSD tier)."""
MAX_SLOT_BYTES = 1 << 30

Kind = Literal["kv", "latent", "indexer", "state", "scale"]
Rule = Literal["all", "trailing", "exact"]


class PartRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the part table. `offset_bytes` counts from the start of its shard."""

    shard: int
    offset_bytes: int
    length_bytes: int
    kind: Kind = "kv"
    first_layer: int = 0
    last_layer: int = 0
    tokens_per_block: int = 0
    """Tokens of one engine block inside the part; 0 where the part is one piece."""
    first_head: int = -1
    """First KV head held here; -1 where every rank holds all of them (replicated)."""
    last_head: int = -1
    dtype: str = "uint8"
    layout: str = ""
    """The engine's name of the byte order inside the part, e.g. `LBHNC`. Equal sizes can differ in order."""


class PoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cache group of the model. Every field is identity: change one and nothing matches any more."""

    parts: tuple[PartRow, ...]
    name: str = "full"
    rule: Rule = "all"
    """Which chunks a hit needs: all = the leading run, trailing = the last `window_chunks`, exact = that boundary."""
    window_chunks: int = 0
    tokens_per_chunk: int = 256


@dataclass(frozen=True, slots=True)
class Group:
    """Parts [first_part, end_part) of every shard: the unit of reading, checking and readiness."""

    first_part: int
    end_part: int
    extents: tuple[tuple[int, int], ...]
    """(offset, length) in the slot, one for each shard that has parts here."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where everything lies in a slot, in bytes from the slot's start."""

    shard_offsets: tuple[int, ...]
    shard_bytes: tuple[int, ...]
    """Payload of each shard without padding: the size that a caller's buffer for it must have."""
    part_ranges: tuple[tuple[tuple[int, int], ...], ...]
    """[shard][part] -> (offset in the slot, length)."""
    groups: tuple[Group, ...]
    parts: int
    """Parts of the shard that has most: what the parts-ready counter ends at."""
    slot_bytes: int
    """A multiple of 4 KiB."""

    @property
    def shards(self) -> int:
        return len(self.shard_offsets)

    @property
    def payload_bytes(self) -> int:
        return sum(self.shard_bytes)


def one_part_pool(size_bytes: int, **fields: object) -> PoolSpec:
    """The simplest pool: one shard of one part of `size_bytes`."""
    return msgspec.convert({"parts": [{"shard": 0, "offset_bytes": 0, "length_bytes": size_bytes}], **fields}, PoolSpec)


def slot_layout(pool: PoolSpec) -> SlotLayout:
    """Check a part table and lay out its slot. Raises Invalid with one sentence that names the bad row."""
    rows = _rows_by_shard(pool)
    shard_offsets, shard_bytes, ranges = [], [], []
    offset = 0
    for shard in rows:
        end = 0
        for row in shard:
            if row.offset_bytes < end:
                raise Invalid(
                    f"pool {pool.name!r}: part at {row.offset_bytes} of shard {row.shard} overlaps the one before it"
                )
            end = row.offset_bytes + row.length_bytes
        shard_offsets.append(offset)
        shard_bytes.append(end)
        ranges.append(tuple((offset + row.offset_bytes, row.length_bytes) for row in shard))
        offset += round_up(end, PAGE_BYTES)
    if offset > MAX_SLOT_BYTES:
        raise Invalid(
            f"pool {pool.name!r}: a chunk of {format_size(offset)} is above the limit of {format_size(MAX_SLOT_BYTES)}"
        )
    return SlotLayout(
        shard_offsets=tuple(shard_offsets),
        shard_bytes=tuple(shard_bytes),
        part_ranges=tuple(ranges),
        groups=_groups(ranges),
        parts=max(len(shard) for shard in ranges),
        slot_bytes=offset,
    )


def _rows_by_shard(pool: PoolSpec) -> list[list[PartRow]]:
    if not 1 <= len(pool.parts) <= MAX_PARTS:
        raise Invalid(f"pool {pool.name!r}: {len(pool.parts)} parts, allowed are 1 to {MAX_PARTS}")
    if pool.tokens_per_chunk < 1 or pool.window_chunks < 0:
        raise Invalid(f"pool {pool.name!r}: tokens_per_chunk must be at least 1 and window_chunks at least 0")
    shards = max(row.shard for row in pool.parts) + 1
    if min(row.shard for row in pool.parts) < 0 or shards > MAX_SHARDS:
        raise Invalid(f"pool {pool.name!r}: shard numbers must be 0 to {MAX_SHARDS - 1}")
    rows: list[list[PartRow]] = [[] for _ in range(shards)]
    for row in pool.parts:
        if row.offset_bytes < 0 or row.length_bytes < 1:
            raise Invalid(
                f"pool {pool.name!r}: a part at offset {row.offset_bytes} of {row.length_bytes} bytes is not possible"
            )
        rows[row.shard].append(row)
    for number, shard in enumerate(rows):
        if not shard:
            raise Invalid(f"pool {pool.name!r}: shard {number} has no part")
    return rows


def _groups(ranges: Sequence[Sequence[tuple[int, int]]]) -> tuple[Group, ...]:
    """Cut the parts into groups of at least GROUP_BYTES, only where every shard's next part starts on a page."""
    parts = max(len(shard) for shard in ranges)
    most = max(1, MAX_EXTENTS // len(ranges))
    total = sum(length for shard in ranges for _, length in shard)
    want = max(GROUP_BYTES, -(-total // most))
    groups: list[Group] = []
    first, size = 0, 0
    for part in range(parts):
        size += sum(shard[part][1] for shard in ranges if part < len(shard))
        last = part + 1 == parts
        aligned = not last and all(part + 1 >= len(s) or s[part + 1][0] % PAGE_BYTES == 0 for s in ranges)
        if last or (size >= want and aligned and len(groups) + 1 < most):
            extents = tuple(
                (
                    shard[first][0],
                    shard[min(part, len(shard) - 1)][0] + shard[min(part, len(shard) - 1)][1] - shard[first][0],
                )
                for shard in ranges
                if first < len(shard)
            )
            groups.append(Group(first, part + 1, extents))
            first, size = part + 1, 0
    return tuple(groups)
