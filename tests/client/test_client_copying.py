"""Callers' buffers of every kind, with plain memory for a slot: what fits is copied, what does not is named."""

from __future__ import annotations

import mmap
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.copying import SPLIT_BYTES, Buffers, Copier, fill_slots, fill_targets

SIZE = 1024
NEVER = float("inf")
PATTERN = np.arange(SIZE, dtype=np.uint64).astype(np.uint8)


def strided(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same 1024 bytes in C order, but not side by side."""
    wide = np.zeros((32, 16), np.uint32)
    wide[:, ::2] = values.view(np.uint32).reshape(32, 8)
    return wide[:, ::2]


def raw(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes


def forms(data: np.ndarray[Any, Any]) -> dict[str, Any]:
    mapped = mmap.mmap(-1, SIZE)
    mapped[:] = data.tobytes()
    return {
        "array": data,
        "floats": data.view(np.float32).reshape(16, 16),
        "read-only bytes": data.tobytes(),
        "bytearray": bytearray(data.tobytes()),
        "memoryview": memoryview(data.copy()),
        "mmap": mapped,
        "raw": raw(data),
        "strided": strided(data),
        "columns first": np.asfortranarray(data.reshape(32, 32)),
        "pieces": [data[:100], memoryview(data[100:200].copy()), raw(data[200:900]), data[900:].tobytes()],
        "pieces, one strided": [strided(data)[:16], data[512:]],
    }


@pytest.mark.parametrize("form", forms(PATTERN))
def test_every_form_is_gathered_into_a_slot(form: str) -> None:
    data = PATTERN.copy()
    source = forms(data)[form]
    buffers = Buffers([source], SIZE, writable=False)
    assert buffers.unfit(1) == set()
    slot = np.zeros(SIZE, np.uint8)
    assert fill_slots([slot.ctypes.data], buffers.targets, SIZE, NEVER) == 1
    assert (slot == PATTERN).all()


def test_every_writable_form_is_filled_from_a_slot() -> None:
    slot = PATTERN.copy()
    backing = np.zeros(SIZE, np.uint8)
    targets: dict[str, Any] = {
        "array": np.zeros(SIZE, np.uint8),
        "bytearray": bytearray(SIZE),
        "raw": raw(backing),
        "strided": strided(np.zeros(SIZE, np.uint8)),
    }
    halves = np.zeros(SIZE // 2, np.uint8), strided(np.zeros(SIZE, np.uint8))[16:]
    buffers = Buffers([*targets.values(), halves], SIZE, writable=True)
    assert buffers.unfit(5) == set()
    assert fill_targets([slot.ctypes.data] * 5, buffers.targets, SIZE, NEVER) == 5
    assert bytes(targets["array"]) == PATTERN.tobytes()
    assert bytes(targets["bytearray"]) == PATTERN.tobytes()
    assert backing.tobytes() == PATTERN.tobytes()
    assert targets["strided"].tobytes() == PATTERN.tobytes()
    assert halves[0].tobytes() + halves[1].tobytes() == PATTERN.tobytes()


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(SIZE - 1, np.uint8),
        np.zeros(SIZE + 1, np.uint8),
        np.zeros(SIZE, np.uint16),
        np.array([None] * (SIZE // 8), object),
        np.array([None] * (SIZE // 8), object)[::-1],
        b"",
        None,
        7,
        "x" * SIZE,
        (0, SIZE),
        (-4096, SIZE),
        (4096, 0),
        [],
        [b"x" * (SIZE - 1), None],
        [b"x" * SIZE, b"y"],
        memoryview(np.zeros(2 * SIZE, np.uint8))[::2],
    ],
    ids=lambda buffer: f"{type(buffer).__name__}",
)
def test_what_does_not_fit_is_unfit_and_costs_its_neighbours_nothing(buffer: object) -> None:
    good = np.zeros(SIZE, np.uint8)
    buffers = Buffers([good, buffer, good], SIZE, writable=False)
    assert buffers.unfit(3) == {1}
    assert [buffers.targets[0], buffers.targets[2]] == [good.ctypes.data] * 2


def test_read_only_memory_is_no_target() -> None:
    frozen = np.zeros(SIZE, np.uint8)
    frozen.flags.writeable = False
    assert Buffers([frozen], SIZE, writable=False).targets == [frozen.ctypes.data]
    for target in (frozen, bytes(SIZE), memoryview(bytes(SIZE)), [frozen[:10], np.zeros(SIZE - 10, np.uint8)]):
        assert Buffers([target], SIZE, writable=True).unfit(1) == {0}


def test_missing_buffers_are_unfit() -> None:
    assert Buffers([np.zeros(SIZE, np.uint8)], SIZE, writable=True).unfit(3) == {1, 2}


def test_a_bytearray_cannot_be_resized_while_its_address_is_held() -> None:
    data = bytearray(SIZE)
    buffers = Buffers([data], SIZE, writable=True)
    with pytest.raises(BufferError):
        data.extend(b"more")
    del buffers
    data.extend(b"more")


@given(cuts=st.lists(st.integers(1, SIZE - 1), max_size=6, unique=True))
def test_scatter_then_gather_gives_the_same_bytes(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), SIZE]
    pieces = [np.zeros(end - start, np.uint8) for start, end in pairwise(bounds)]
    buffers = Buffers([pieces], SIZE, writable=True)
    source, back = PATTERN.copy(), np.zeros(SIZE, np.uint8)
    fill_targets([source.ctypes.data], buffers.targets, SIZE, NEVER)
    assert np.concatenate(pieces).tobytes() == PATTERN.tobytes()
    fill_slots([back.ctypes.data], buffers.targets, SIZE, NEVER)
    assert back.tobytes() == PATTERN.tobytes()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_copier_copies_all_or_stops_at_its_deadline(threads: int) -> None:
    size, count = SPLIT_BYTES // 4, 10
    slots = [np.full(size, i, np.uint8) for i in range(count)]
    targets = [np.full(size, 255, np.uint8) for _ in range(count)]
    addresses = [slot.ctypes.data for slot in slots], [target.ctypes.data for target in targets]
    copier = Copier(threads)
    try:
        assert copier.fill_targets(*addresses, size, time.monotonic() - 1) == 0
        assert all((target == 255).all() for target in targets)
        assert copier.fill_targets(*addresses, size, time.monotonic() + 60) == count
        assert all((target == i).all() for i, target in enumerate(targets))
    finally:
        copier.close()
    assert copier.fill_targets(*addresses, size, time.monotonic() + 60) >= 1, "closed: what it can do alone"
