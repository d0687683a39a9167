"""The copier, byte by byte: every layout that vLLM knows, odd tails, MLA, one-byte items, and what is refused.

The oracle knows nothing of addresses: it takes the logical view of a cache through numpy's own indexing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.connectors.transfer import HostCopier, LayerPages, layer_pages

LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
CANARY = 0xA5


class Cache:
    """A cache in one layout, between two canaries; `views[layer]` is logical: [block, head, token, content]."""

    def __init__(self, layout: str, sizes: tuple[int, ...], dtype: Any = np.float32) -> None:
        order = LAYOUTS[layout]
        physical = tuple(sizes[axis] for axis in order)
        count = int(np.prod(sizes))
        self.raw = np.full(count * np.dtype(dtype).itemsize + 128, CANARY, np.uint8)
        body = self.raw[64:-64].view(dtype).reshape(physical)
        self.views = list(np.transpose(body, np.argsort(order)))
        self.page_bytes = count // sizes[0] // sizes[1] * np.dtype(dtype).itemsize

    def fill(self, seed: int) -> None:
        noise = np.random.default_rng(seed).integers(0, 256, self.raw.size - 128, np.uint8)
        self.raw[64:-64] = noise

    def pages(self) -> list[LayerPages]:
        return [
            layer_pages(
                view.ctypes.data, view.itemsize, view.shape, [s // view.itemsize for s in view.strides], view.shape[0]
            )
            for view in self.views
        ]

    def content(self, block: int) -> list[bytes]:
        return [view[block].tobytes() for view in self.views]


def copier(cache: Cache) -> HostCopier:
    return HostCopier(cache.pages(), cache)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8])
def test_blocks_come_back_in_other_places_and_nothing_else_changes(layout: str, dtype: Any) -> None:
    source, target = (Cache(layout, (3, 12, 2, 5, 7), dtype) for _ in range(2))
    source.fill(1)
    target.fill(2)
    before = target.raw.copy()
    shard = bytearray(3 * 4 * source.page_bytes)
    copier(source).gather(None, [4, 5, 9, 2], memoryview(shard))
    copier(target).scatter(None, memoryview(shard), 1, 4, [7, 1, 8])
    for block, restored in zip([5, 9, 2], [7, 1, 8], strict=True):
        assert target.content(restored) == source.content(block)
    changed = np.flatnonzero(before != target.raw)
    assert changed.size
    mask = Cache(layout, (3, 12, 2, 5, 7), dtype)
    mask.raw[:] = 0
    for view in mask.views:
        view[[7, 1, 8]] = np.frombuffer(b"\1" * dtype().itemsize, dtype)[0]
    assert (mask.raw != 0)[changed].all(), "bytes outside of the blocks were written"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_layouts_never_agree_on_bytes_by_accident(layout: str) -> None:
    """Why the layout's name is part of the identity: the shard keeps the engine's order."""
    cache = Cache(layout, (2, 6, 2, 3, 4))
    cache.fill(3)
    shard = bytearray(2 * cache.page_bytes)
    copier(cache).gather(None, [3], memoryview(shard))
    page = np.frombuffer(bytes(shard[: cache.page_bytes]), np.float32)
    order = [axis - 1 for axis in LAYOUTS[layout] if axis > 1]  # of heads, tokens and content among themselves
    logical = cache.views[0][3]
    physical = np.transpose(logical, [axis - 1 for axis in order])
    np.testing.assert_array_equal(page.view(np.uint8), np.ascontiguousarray(physical).reshape(-1).view(np.uint8))


@settings(deadline=None, max_examples=60)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    sizes=st.tuples(*[st.integers(1, 4)] * 1, st.integers(2, 9), *[st.integers(1, 4)] * 3),
    data=st.data(),
)
def test_any_blocks_of_any_shape_survive(layout: str, sizes: tuple[int, ...], data: st.DataObject) -> None:
    source, target = Cache(layout, sizes), Cache(layout, sizes)
    source.fill(4)
    order = data.draw(st.permutations(range(sizes[1])))
    count = data.draw(st.integers(1, sizes[1]))
    first = data.draw(st.integers(0, count - 1))
    blocks, places = order[:count], list(range(sizes[1]))[: count - first]
    shard = bytearray(sizes[0] * count * source.page_bytes)
    copier(source).gather(None, blocks, memoryview(shard))
    copier(target).scatter(None, memoryview(shard), first, count, places)
    for block, place in zip(blocks[first:], places, strict=True):
        assert target.content(place) == source.content(block)
    assert (target.raw[:64] == CANARY).all()
    assert (target.raw[-64:] == CANARY).all()


def test_latent_caches_are_one_head_of_many_bytes() -> None:
    cache = Cache("LBNHC", (2, 8, 1, 16, 576), np.uint16)
    assert [pages.runs for pages in cache.pages()] == [((0, 16 * 576 * 2),)] * 2
    assert all(pages.adjacent for pages in cache.pages())


def test_adjacent_blocks_are_one_copy_where_the_layout_allows_it() -> None:
    together, apart = Cache("LBHNC", (1, 8, 2, 3, 4)), Cache("BLHNC", (2, 8, 2, 3, 4))
    assert together.pages()[0].adjacent
    assert not apart.pages()[0].adjacent
    runs = list(copier(together)._runs(together.pages()[0], [2, 3, 4, 6]))
    assert [length for _, _, length in runs] == [3 * together.page_bytes, together.page_bytes]


def test_a_kernel_with_smaller_blocks_than_the_tables() -> None:
    """The tensor counts kernel blocks; two of them are a block of the tables."""
    raw = np.arange(12 * 3 * 4, dtype=np.float32).reshape(12, 1, 3, 4)
    pages = layer_pages(raw.ctypes.data, 4, raw.shape, [s // 4 for s in raw.strides], 6)
    assert pages.page_bytes == 2 * 3 * 4 * 4
    shard = bytearray(pages.page_bytes)
    HostCopier([pages], raw).gather(None, [4], memoryview(shard))
    assert bytes(shard) == raw[8:10].tobytes()


@pytest.mark.parametrize(
    ("shape", "strides", "blocks"),
    [((5, 4), (4, 1), 2), ((4, 4), (4, 1), 0), ((3, 4), (4, 1), 6), ((4, 4, 2), (4, 1, 1), 4)],
)
def test_impossible_caches_are_refused(shape: tuple[int, ...], strides: tuple[int, ...], blocks: int) -> None:
    with pytest.raises(ValueError, match=r"does not hold|overlap"):
        layer_pages(4096, 4, shape, strides, blocks)


@pytest.mark.parametrize("blocks", [[], [-1], [12], [3, 12]])
def test_blocks_out_of_range_are_refused_and_nothing_is_copied(blocks: list[int]) -> None:
    cache = Cache("LBHNC", (2, 12, 2, 3, 4))
    before = cache.raw.copy()
    shard = memoryview(bytearray(2 * max(len(blocks), 1) * cache.page_bytes))
    with pytest.raises(ValueError, match="blocks must be among"):
        copier(cache).scatter(None, shard, 0, max(len(blocks), 1), blocks)
    np.testing.assert_array_equal(before, cache.raw)


def test_shards_of_another_size_are_refused() -> None:
    cache = Cache("LBHNC", (2, 12, 2, 3, 4))
    with pytest.raises(ValueError, match="does not hold"):
        copier(cache).gather(None, [1, 2], memoryview(bytearray(3 * cache.page_bytes)))
    with pytest.raises(ValueError, match="not in a chunk"):
        copier(cache).scatter(None, memoryview(bytearray(4 * cache.page_bytes)), 1, 2, [1, 2])
    closed = copier(cache)
    closed.close()
    with pytest.raises(ValueError, match="blocks must be among"):
        closed.gather(None, [1], memoryview(bytearray(2 * cache.page_bytes)))
