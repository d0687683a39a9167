"""The control page: what every 4 KiB page of the arena is worth, in a memfd that only the daemon can write.

Layout (docs/formats.md): u64 generation of each page, then u32 parts-ready of each page, rounded up to 4 KiB; entries
are in the machine's byte order, and a slot uses the entry of its first page (offset // 4096).

Generation: ODD while the slot is free or being written, EVEN while readable. A reader has an even generation from its
lease and looks at it before and after its copy; a change makes the copy a miss. Parts-ready: how many parts of the
slot's shards may be read, or FAILED. Who publishes obeys this order, which readers rely on:
1. taking a slot away: generation (odd). Parts-ready 0 or FAILED and a `wake` after that only hasten those who wait:
   they look at the generation every 10 ms anyway;
2. giving it out: payload, then parts-ready, then generation (even); while it is filled: payload, parts-ready, `wake`.
Aligned 8- and 4-byte stores are not torn; x86-64 keeps the order of stores. Other machines were not tried.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.units import PAGE_BYTES, round_up

FAILED = 0xFFFFFFFF
"""In parts-ready: the fill failed, nothing more will come. As the greatest number it ends every wait."""
F_SEAL_FUTURE_WRITE = 0x10
"""No new writable mapping and no write(2), through any descriptor; mappings made before go on (fcntl(2), Linux 5.1)."""
_GENERATION_BYTES = 8
_PARTS_BYTES = 4


def pages_of(arena_bytes: int) -> int:
    return arena_bytes // PAGE_BYTES


def control_size(arena_bytes: int) -> int:
    """Bytes of the control memfd of such an arena: 0.3 % of it."""
    return round_up(pages_of(arena_bytes) * (_GENERATION_BYTES + _PARTS_BYTES), PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class ControlViews:
    """Both tables over one mapping, writable where the mapping is. Views keep the mapping alive."""

    generations: npt.NDArray[np.uint64]
    parts_ready: npt.NDArray[np.uint32]
    generation_words: memoryview
    """The same as `generations`, for single entries: a third of numpy's cost, and plain ints."""
    parts_words: memoryview
    parts_address: int
    """Of parts_ready[0]: entry n is the futex word at parts_address + 4 * n."""


def control_views(mapping: mmap.mmap, arena_bytes: int) -> ControlViews:
    pages = pages_of(arena_bytes)
    split = pages * _GENERATION_BYTES
    whole = memoryview(mapping)
    generation_words = whole[:split].cast("Q")
    parts_words = whole[split : split + pages * _PARTS_BYTES].cast("I")
    parts_ready = np.frombuffer(parts_words, np.uint32)
    return ControlViews(
        np.frombuffer(generation_words, np.uint64), parts_ready, generation_words, parts_words, parts_ready.ctypes.data
    )
