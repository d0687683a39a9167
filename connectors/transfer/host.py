"""The copier for caches in host memory: memmove, which releases the GIL, over runs that are as long as they can be."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.connectors.transfer.pages import LayerPages

_memmove = ctypes.memmove


class HostCopier:
    """See `Copier`. The owner keeps the memory behind `layers` alive until `close`."""

    def __init__(self, layers: Sequence[LayerPages], owner: object = None) -> None:
        """owner: what keeps the memory alive, as the tensors do. Raises ValueError for layers of unequal pages."""
        if not layers or len({(pages.page_bytes, pages.blocks) for pages in layers}) != 1:
            raise ValueError("the layers of one group have pages of one size, and equally many")
        self._layers = tuple(layers)
        self._owner = owner
        self._blocks = layers[0].blocks
        self._page_bytes = layers[0].page_bytes

    @property
    def layers(self) -> int:
        return len(self._layers)

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    def mark(self) -> object:
        return None

    def gather(self, mark: object, blocks: Sequence[int], shard: memoryview) -> None:
        address = self._check(blocks, shard, 0, len(blocks))
        for pages in self._layers:
            for place, offset, length in self._runs(pages, blocks):
                _memmove(address + offset, place, length)
            address += len(blocks) * self._page_bytes

    def scatter(self, mark: object, shard: memoryview, first: int, chunk_blocks: int, blocks: Sequence[int]) -> None:
        address = self._check(blocks, shard, first, chunk_blocks) + first * self._page_bytes
        for pages in self._layers:
            for place, offset, length in self._runs(pages, blocks):
                _memmove(place, address + offset, length)
            address += chunk_blocks * self._page_bytes

    def close(self) -> None:
        self._layers, self._owner, self._blocks = (), None, 0

    def _check(self, blocks: Sequence[int], shard: memoryview, first: int, chunk_blocks: int) -> int:
        """The address of `shard`."""
        if not blocks or min(blocks) < 0 or max(blocks) >= self._blocks:
            raise ValueError(f"blocks must be among {self._blocks}")
        if first < 0 or first + len(blocks) > chunk_blocks:
            raise ValueError(f"{len(blocks)} blocks from {first} on are not in a chunk of {chunk_blocks}")
        if shard.nbytes != len(self._layers) * chunk_blocks * self._page_bytes:
            raise ValueError(f"a shard of {shard.nbytes} bytes does not hold {chunk_blocks} blocks")
        address: int = np.frombuffer(shard, np.uint8).ctypes.data
        return address

    def _runs(self, pages: LayerPages, blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(address, offset in the part, length) of what can be copied at once."""
        offset = 0
        if not pages.adjacent:
            for block in blocks:
                start = pages.address + block * pages.block_stride_bytes
                for run, length in pages.runs:
                    yield start + run, offset, length
                    offset += length
            return
        size = self._page_bytes
        first = previous = blocks[0]
        for block in blocks[1:]:
            if block != previous + 1:
                length = (previous + 1 - first) * size
                yield pages.address + first * size, offset, length
                offset += length
                first = block
            previous = block
        yield pages.address + first * size, offset, (previous + 1 - first) * size
