"""Where the bytes of a block of one layer lie, worked out from a tensor's shape and strides. Pure.

Engines give logical views whose axes may lie in any order in memory; a page is then one run of bytes, or several. Runs
are taken in the order of their addresses, so every layout is copied as it is and never transposed: the name of the
layout is part of the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer, by block number."""

    address: int
    """Of block 0."""
    block_stride_bytes: int
    runs: tuple[tuple[int, int], ...]
    """(offset from the block's address, length) in ascending order, adjacent ones joined."""
    blocks: int

    @property
    def page_bytes(self) -> int:
        return sum(length for _, length in self.runs)

    @property
    def adjacent(self) -> bool:
        """Whether consecutive blocks lie side by side, so that several can be copied at once."""
        return len(self.runs) == 1 and self.runs[0] == (0, self.block_stride_bytes)


def layer_pages(address: int, item_bytes: int, shape: Sequence[int], strides: Sequence[int], blocks: int) -> LayerPages:
    """shape and strides (in items) as of a tensor whose first axis counts blocks, or whole fractions of blocks.

    blocks: how many the engine's tables speak of; the first axis has so many or a multiple (a kernel that uses smaller
    blocks than the tables). Raises ValueError where that does not hold, or where bytes of a block overlap.
    """
    if blocks < 1 or len(shape) != len(strides) or not shape or shape[0] < blocks or shape[0] % blocks:
        raise ValueError(f"a cache of shape {tuple(shape)} does not hold {blocks} blocks")
    ratio = shape[0] // blocks
    axes = [(strides[0] * item_bytes, ratio)]
    axes += [(stride * item_bytes, size) for stride, size in zip(strides[1:], shape[1:], strict=True)]
    axes = sorted(((stride, size) for stride, size in axes if size > 1), reverse=True)
    offsets = sorted(
        sum(place) for place in product(*(range(0, stride * size, stride) for stride, size in _outer(axes, item_bytes)))
    )
    length = _run_bytes(axes, item_bytes)
    runs: list[tuple[int, int]] = []
    for offset in offsets:
        if runs and offset < runs[-1][0] + runs[-1][1]:
            raise ValueError(f"bytes of a block overlap: shape {tuple(shape)}, strides {tuple(strides)}")
        if runs and offset == runs[-1][0] + runs[-1][1]:
            runs[-1] = runs[-1][0], runs[-1][1] + length
        else:
            runs.append((offset, length))
    return LayerPages(address, strides[0] * item_bytes * ratio, tuple(runs), blocks)


def _dense(axes: Sequence[tuple[int, int]], item_bytes: int) -> int:
    """How many of the last axes lie without gaps."""
    run, count = item_bytes, 0
    for stride, size in reversed(axes):
        if stride != run:
            break
        run, count = run * size, count + 1
    return count


def _outer(axes: Sequence[tuple[int, int]], item_bytes: int) -> Sequence[tuple[int, int]]:
    return axes[: len(axes) - _dense(axes, item_bytes)]


def _run_bytes(axes: Sequence[tuple[int, int]], item_bytes: int) -> int:
    run = item_bytes
    for _, size in axes[len(axes) - _dense(axes, item_bytes) :]:
        run *= size
    return run
