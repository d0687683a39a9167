"""The record header: round trip, every damaged byte is found, sums bind payload to identity, age and address."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_strategies import FAST, keys32
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corrupt
from kvstore.layout import MAX_EXTENTS, one_part_pool, slot_layout
from kvstore.record import DEAD, HEADER_BYTES, MAGIC, Header, extents_of, pack, seed, sum_extents, unpack

u64 = st.integers(0, 2**64 - 1)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    extents = draw(st.lists(st.tuples(u64, u64), max_size=MAX_EXTENTS).map(tuple))
    sums = tuple(
        draw(st.binary(min_size=16 * len(extents), max_size=16 * len(extents)))[i * 16 :][:16]
        for i in range(len(extents))
    )
    pool, sequence, place, size = draw(st.integers(0, 2**32 - 1)), draw(u64), draw(u64), draw(u64)
    return Header(draw(keys32), pool, draw(keys32), draw(keys32), sequence, place, size, extents, sums)


ONE = Header(
    bytes(range(32)), 3, bytes(range(32, 64)), bytes(range(64, 96)), 7, 1 << 40, 5000,
    ((0, 4096), (4096, 904)), (bytes(range(16)), bytes(range(16, 32))),
)  # fmt: skip
USED_BYTES = 144 + 2 * 32 + 16
"""Fixed part, two extents, checksum: docs/formats.md."""


@given(headers())
@FAST
def test_round_trip(header: Header) -> None:
    block = pack(header)
    assert len(block) == HEADER_BYTES
    assert unpack(block) == header
    assert unpack(memoryview(block + b"behind")) == header


def test_every_flipped_bit_of_the_used_area_is_corruption() -> None:
    block = pack(ONE)
    assert not any(block[USED_BYTES:])
    assert any(block[USED_BYTES - 16 : USED_BYTES])
    for position in range(USED_BYTES):
        for bit in range(8):
            damaged = bytearray(block)
            damaged[position] ^= 1 << bit
            with pytest.raises(Corrupt):
                unpack(bytes(damaged))


@given(headers(), st.data())
@FAST
def test_any_flipped_byte_is_corruption(header: Header, data: st.DataObject) -> None:
    block = bytearray(pack(header))
    position = data.draw(st.integers(0, 144 + 32 * len(header.extents) + 15))
    block[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt):
        unpack(bytes(block))


@given(st.binary(max_size=300), st.booleans())
@FAST
def test_garbage_is_corrupt_or_nothing(garbage: bytes, with_magic: bool) -> None:
    block = ((MAGIC if with_magic else b"") + garbage).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]
    try:
        assert unpack(block) is None
        assert not any(block[:144])
    except Corrupt:
        pass


def test_dead_and_never_written_are_nothing() -> None:
    assert unpack(DEAD) is None
    assert len(DEAD) == HEADER_BYTES


@pytest.mark.parametrize("size", [0, 1, 143, 4095])
def test_a_truncated_block_is_corrupt(size: int) -> None:
    for block in (pack(ONE)[:size], DEAD[:size]):
        with pytest.raises(Corrupt, match="bytes"):
            unpack(block)


def test_another_format_version_is_told_apart_from_damage() -> None:
    block = bytearray(pack(ONE))
    block[8] = 9
    with pytest.raises(Corrupt, match="format version 9, this program reads 1"):
        unpack(bytes(block))


def test_too_many_extents_are_never_followed_out_of_the_block() -> None:
    block = bytearray(pack(ONE))
    block[10:12] = b"\xff\xff"
    with pytest.raises(Corrupt, match="65535 extents"):
        unpack(bytes(block))


def test_a_swapped_header_differs_from_what_was_asked() -> None:
    """pack does not judge identity; unpack gives back all of it, so that the reader can."""
    for field, value in (("root", bytes(32)), ("key", bytes(32)), ("place", 8), ("sequence", 8), ("pool", 0)):
        other = replace(ONE, **{field: value})
        assert unpack(pack(other)) == other != ONE


def test_sums_depend_on_bytes_identity_age_and_address() -> None:
    layout = slot_layout(one_part_pool(9000))
    payload = memoryview(bytes(range(256)) * (layout.slot_bytes // 256))
    identity = (b"r" * 32, 1, b"k" * 32, 5, 1 << 30)
    sums = sum_extents(payload, extents_of(layout), seed(*identity))
    assert [len(digest) for digest in sums] == [16]
    others = [(b"R" * 32, *identity[1:]), (*identity[:1], 2, *identity[2:]), (*identity[:2], b"K" * 32, *identity[3:])]
    others += [(*identity[:3], 6, identity[4]), (*identity[:4], 0)]
    for other in others:
        assert sum_extents(payload, extents_of(layout), seed(*other)) != sums


@given(st.integers(0, 8999), st.integers(1, 255))
@FAST
def test_any_payload_byte_counts_and_padding_does_not(position: int, change: int) -> None:
    layout = slot_layout(one_part_pool(9000))
    payload = bytearray(layout.slot_bytes)
    sums = sum_extents(memoryview(payload), extents_of(layout), 1)
    payload[9000] = 1
    assert sum_extents(memoryview(payload), extents_of(layout), 1) == sums
    payload[position] ^= change
    assert sum_extents(memoryview(payload), extents_of(layout), 1) != sums
