"""Which blocks make which chunks: properties against a model that counts tokens one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connectors.vllm.plan import (
    LEAST_CHUNK_BYTES,
    MOST_CHUNK_TOKENS,
    Geometry,
    blocks_per_chunk,
    chunk_keys,
    parent_key,
    plan_load,
    plan_save,
    whole_chunks,
)
from kvstore.keys import NO_PARENT

geometries = st.builds(Geometry, st.sampled_from([16, 32]), st.integers(1, 6), st.integers(1, 2))


def hashes_of(geometry: Geometry, tokens: int) -> list[bytes]:
    step = geometry.block_tokens // geometry.hashes_per_block
    return [(i + 1).to_bytes(32, "big") for i in range(tokens // step)]


@given(geometry=geometries, local_blocks=st.integers(0, 20), tokens=st.integers(1, 400))
def test_a_load_covers_its_tokens_and_no_block_of_the_engines_own(
    geometry: Geometry, local_blocks: int, tokens: int
) -> None:
    local = local_blocks * geometry.block_tokens
    needed = -(-(local + tokens) // geometry.block_tokens)
    table = list(range(100, 100 + needed + 3))
    at = {}
    for piece in plan_load(geometry, table, local, tokens):
        for i, block in enumerate(piece.blocks):
            assert 0 <= piece.first + i < geometry.blocks_per_chunk
            assert block not in at
            at[block] = piece.chunk * geometry.blocks_per_chunk + piece.first + i
    assert at == {table[place]: place for place in range(local_blocks, needed)}


@given(geometry=geometries, tokens=st.integers(0, 600), cut=st.integers(0, 600))
def test_saving_in_any_steps_saves_each_whole_chunk_once(geometry: Geometry, tokens: int, cut: int) -> None:
    hashes = hashes_of(geometry, tokens)
    table = list(range(1, tokens // geometry.block_tokens + 1))
    middle = whole_chunks(geometry, min(cut, tokens), len(hashes))
    end = whole_chunks(geometry, tokens, len(hashes))
    pieces = plan_save(geometry, table, 0, middle) + plan_save(geometry, table, middle, end)
    assert [piece.chunk for piece in pieces] == list(range(tokens // geometry.chunk_tokens))
    assert all(piece.first == 0 and len(piece.blocks) == geometry.blocks_per_chunk for piece in pieces)
    assert [block for piece in pieces for block in piece.blocks] == table[: end * geometry.blocks_per_chunk]


@given(geometry=geometries, tokens=st.integers(0, 600), known=st.integers(0, 60))
def test_a_chunk_needs_its_tokens_and_its_hash(geometry: Geometry, tokens: int, known: int) -> None:
    count = whole_chunks(geometry, tokens, known)
    assert count * geometry.chunk_tokens <= tokens
    assert count * geometry.blocks_per_chunk * geometry.hashes_per_block <= known
    more = count + 1
    assert more * geometry.chunk_tokens > tokens or more * geometry.blocks_per_chunk * geometry.hashes_per_block > known


@given(geometry=geometries, chunks=st.integers(1, 12))
def test_keys_are_the_last_blocks_hashes_and_parents_the_keys_before(geometry: Geometry, chunks: int) -> None:
    hashes = hashes_of(geometry, chunks * geometry.chunk_tokens)
    keys = chunk_keys(geometry, hashes, 0, chunks)
    step = len(hashes) // chunks
    assert list(keys) == hashes[step - 1 :: step]
    assert [parent_key(geometry, hashes, i) for i in range(chunks)] == [NO_PARENT, *keys[:-1]]


def test_negative_counts_are_no_chunks() -> None:
    """A failed load takes the engine's count of computed tokens down; in flight tokens may even exceed it."""
    assert whole_chunks(Geometry(32, 2), -5, 10) == 0


@given(block_tokens=st.sampled_from([16, 32, 64, 256, 512]), block_bytes=st.integers(1, 1 << 24))
def test_chunks_are_the_fewest_blocks_that_are_worth_it(block_tokens: int, block_bytes: int) -> None:
    count = blocks_per_chunk(block_tokens, block_bytes)
    assert count >= 1
    assert (count - 1) * block_bytes < LEAST_CHUNK_BYTES
    assert count * block_bytes >= LEAST_CHUNK_BYTES or (count + 1) * block_tokens > MOST_CHUNK_TOKENS


def test_chunk_tokens_by_hand() -> None:
    assert blocks_per_chunk(32, 1000, 96) == 3
    for wanted in (0, 16, 33):
        with pytest.raises(ValueError, match="multiple of the engine's block of 32"):
            blocks_per_chunk(32, 1000, wanted)


def test_tables_that_cannot_be_are_refused() -> None:
    geometry = Geometry(32, 2)
    with pytest.raises(ValueError, match="are needed"):
        plan_save(geometry, [1, 2, 3], 0, 2)
    with pytest.raises(ValueError, match="null block"):
        plan_load(geometry, [1, 0, 3], 32, 32)
    with pytest.raises(ValueError, match="inside of a block"):
        plan_load(geometry, [1, 2, 3], 16, 32)
    assert plan_load(geometry, [0, 2, 3], 32, 33)[0].blocks == (2,)
