"""Sizes as people write them, clocks, and chained keys."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from core_strategies import FAST
from hypothesis import given
from hypothesis import strategies as st

from kvstore.clock import ManualClock, MonotonicClock
from kvstore.errors import BY_CODE, Corrupt, Invalid, KVStoreError, from_code
from kvstore.keys import NO_PARENT, chain_keys, chain_parents, join_keys, split_keys
from kvstore.units import format_size, parse_size, round_up


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("4096", 4096), (4096, 4096), (" 64GiB ", 64 << 30), ("64 gib", 64 << 30), ("64G", 64 << 30),
        ("1.5GB", 1_500_000_000), ("512 MB", 512_000_000), ("0.5K", 512), ("3TB", 3 * 10**12), ("7b", 7),
        ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_sizes_that_are_understood(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", -1, "1 XB", "1e9", "30%", "1.5.2G", "٣G", "9" * 400, "9" * 5000, True]
)
def test_sizes_that_are_refused_in_one_sentence(text: str | int) -> None:
    """Regression: a number of 400 digits was an OverflowError, for it went through a float."""
    with pytest.raises(Invalid) as caught:
        parse_size(text)
    assert "\n" not in str(caught.value)


def test_shares() -> None:
    assert parse_size("30%", 1000) == 300
    assert parse_size(" 12.5 % ", 1 << 40) == 1 << 37
    assert parse_size("100%", 7) == 7
    for text in ("101%", "100.1%", "999%", "-1%", "%"):
        with pytest.raises(Invalid):
            parse_size(text, 1000)


@given(st.integers(0, 1 << 50))
@FAST
def test_formatted_sizes_read_back_within_rounding(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= size * 0.05 + 1


def test_formats() -> None:
    assert [format_size(n) for n in (0, 1023, 1024, 1536, 64 << 30, 5 << 40, 3000 << 40)] == [
        "0 B", "1023 B", "1 KiB", "1.5 KiB", "64 GiB", "5.0 TiB", "3000.0 TiB",
    ]  # fmt: skip


@given(st.integers(0, 1 << 60), st.integers(1, 1 << 30))
@FAST
def test_round_up_is_the_least_multiple_not_below(value: int, step: int) -> None:
    up = round_up(value, step)
    assert up % step == 0
    assert value <= up < value + step


def test_clocks() -> None:
    clock = ManualClock(5)
    clock.advance(2.5)
    assert clock.now() == 7.5
    real = MonotonicClock()
    assert real.now() <= real.now()


def test_errors_survive_the_wire_by_code() -> None:
    for code, kind in BY_CODE.items():
        error = from_code(code, "why")
        assert type(error) is kind
        assert (error.code, str(error)) == (code, "why")
    assert type(from_code("of a newer daemon", "why")) is KVStoreError
    assert len({kind.code for kind in KVStoreError.__subclasses__()}) == len(BY_CODE) - 1
    assert issubclass(Corrupt, KVStoreError)


tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, st.integers(1, 7), st.binary(max_size=8))
@FAST
def test_keys_are_the_documented_chain(ids: list[int], step: int, seed: bytes) -> None:
    expected, key = [], hashlib.sha256(seed).digest()
    for start in range(0, len(ids) - step + 1, step):
        key = hashlib.sha256(key + struct.pack(f"<{step}I", *ids[start : start + step])).digest()
        expected.append(key)
    assert chain_keys(ids, step, seed) == expected
    assert chain_keys(np.array(ids, np.int64), step, seed) == expected


@given(tokens, tokens, st.integers(1, 5))
@FAST
def test_equal_keys_mean_equal_prefixes(one: list[int], two: list[int], step: int) -> None:
    for number, (a, b) in enumerate(zip(chain_keys(one, step), chain_keys(two, step), strict=False)):
        end = (number + 1) * step
        assert (a == b) == (one[:end] == two[:end])


def test_a_tail_shorter_than_a_chunk_has_no_key() -> None:
    assert chain_keys([1, 2, 3], 4) == []
    assert len(chain_keys([1, 2, 3, 4, 5], 2)) == 2


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["a"], [True], [2**70], [-1, 2**63], [[1, 2], [3, 4]]])
def test_bad_token_ids_are_invalid(ids: list[object]) -> None:
    """Regression: a two-dimensional array was hashed as if it were one sequence."""
    with pytest.raises(Invalid):
        chain_keys(ids, 1)  # type: ignore[arg-type]


def test_chunk_length_below_one_is_invalid() -> None:
    with pytest.raises(Invalid):
        chain_keys([1], 0)


def test_parents_follow_the_chain() -> None:
    keys = chain_keys(range(6), 2)
    assert chain_parents(keys) == [NO_PARENT, keys[0], keys[1]]
    assert chain_parents(keys[1:], keys[0]) == [keys[0], keys[1]]
    assert chain_parents([]) == []


def test_packed_keys() -> None:
    keys = chain_keys(range(6), 2)
    assert split_keys(join_keys(keys)) == keys
    assert split_keys(b"") == []
    for size in (1, 31, 33):
        with pytest.raises(Invalid):
            split_keys(bytes(size))
