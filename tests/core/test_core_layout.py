"""Part tables and slots: what is accepted, where things lie, how parts are grouped."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from core_strategies import FAST, PAGE, pools
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Invalid
from kvstore.layout import (
    GROUP_BYTES,
    MAX_EXTENTS,
    MAX_PARTS,
    MAX_SHARDS,
    MAX_SLOT_BYTES,
    PartRow,
    PoolSpec,
    one_part_pool,
    slot_layout,
)
from kvstore.record import extents_of


@given(pools())
@FAST
def test_shards_lie_on_pages_one_after_another(pool: PoolSpec) -> None:
    layout = slot_layout(pool)
    end = 0
    for shard, (offset, size) in enumerate(zip(layout.shard_offsets, layout.shard_bytes, strict=True)):
        assert offset % PAGE == 0
        assert offset >= end
        assert offset - end < PAGE
        rows = [row for row in pool.parts if row.shard == shard]
        assert layout.part_ranges[shard] == tuple((offset + row.offset_bytes, row.length_bytes) for row in rows)
        assert size == rows[-1].offset_bytes + rows[-1].length_bytes
        end = offset + size
    assert layout.slot_bytes % PAGE == 0
    assert 0 <= layout.slot_bytes - end < PAGE
    assert layout.shards == len(layout.shard_offsets)
    assert layout.payload_bytes == sum(layout.shard_bytes)
    assert layout.parts == max(map(len, layout.part_ranges))


@given(pools(max_shards=3, max_parts=20))
@FAST
def test_groups_cover_every_part_once_and_start_on_pages(pool: PoolSpec) -> None:
    layout = slot_layout(pool)
    assert [group.first_part for group in layout.groups] == [0, *(group.end_part for group in layout.groups[:-1])]
    assert layout.groups[-1].end_part == layout.parts
    for number, group in enumerate(layout.groups):
        shards = [ranges[group.first_part : group.end_part] for ranges in layout.part_ranges]
        held = [ranges for ranges in shards if ranges]
        assert group.extents == tuple((ranges[0][0], ranges[-1][0] + ranges[-1][1] - ranges[0][0]) for ranges in held)
        if number:
            assert all(offset % PAGE == 0 for offset, _ in group.extents)
        if number + 1 < len(layout.groups):
            assert sum(length for ranges in held for _, length in ranges) >= GROUP_BYTES


@given(pools(max_shards=6, max_parts=12))
@FAST
def test_extents_are_disjoint_and_hold_every_payload_byte(pool: PoolSpec) -> None:
    layout = slot_layout(pool)
    extents = extents_of(layout)
    assert len(extents) <= MAX_EXTENTS
    ordered = sorted(extents)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(ordered))
    assert ordered[-1][0] + ordered[-1][1] <= layout.slot_bytes
    for ranges in layout.part_ranges:
        for offset, length in ranges:
            assert any(start <= offset and offset + length <= start + size for start, size in extents)


@pytest.mark.parametrize(("shards", "parts"), [(1, MAX_PARTS), (MAX_SHARDS, MAX_PARTS // MAX_SHARDS), (3, 1000)])
def test_the_widest_tables_still_fit_a_record_header(shards: int, parts: int) -> None:
    rows = [PartRow(shard, n * 16 * PAGE, 16 * PAGE) for shard in range(shards) for n in range(parts)]
    layout = slot_layout(PoolSpec(tuple(rows)))
    assert 1 < len(extents_of(layout)) <= MAX_EXTENTS


def row(**fields: object) -> PartRow:
    return msgspec.structs.replace(PartRow(0, 0, 100), **fields)


@pytest.mark.parametrize(
    ("pool", "why"),
    [
        (PoolSpec(()), "0 parts"),
        (PoolSpec((row(),) * (MAX_PARTS + 1)), "4097 parts"),
        (PoolSpec((row(length_bytes=0),)), "not possible"),
        (PoolSpec((row(offset_bytes=-1),)), "not possible"),
        (PoolSpec((row(), row(offset_bytes=99))), "overlaps"),
        (PoolSpec((row(offset_bytes=100), row())), "overlaps"),
        (PoolSpec((row(shard=-1),)), "shard numbers"),
        (PoolSpec((row(shard=MAX_SHARDS),)), "shard numbers"),
        (PoolSpec((row(), row(shard=2))), "shard 1 has no part"),
        (PoolSpec((row(length_bytes=MAX_SLOT_BYTES + 1),)), "above the limit"),
        (PoolSpec((row(offset_bytes=2**62),)), "above the limit"),
        (PoolSpec((row(),), tokens_per_chunk=0), "tokens_per_chunk"),
        (PoolSpec((row(),), window_chunks=-1), "window_chunks"),
    ],
)
def test_wrong_part_tables_name_the_fault(pool: PoolSpec, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        slot_layout(pool)


@given(st.integers(1, 1 << 24))
@FAST
def test_the_simplest_pool(size: int) -> None:
    layout = slot_layout(one_part_pool(size, name="state", rule="exact"))
    assert layout.shard_bytes == (size,)
    assert layout.slot_bytes == -(-size // PAGE) * PAGE
    assert extents_of(layout) == ((0, size),)
