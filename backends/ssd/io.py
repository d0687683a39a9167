"""Moving bytes: page-aligned scratch, whole vectored reads and writes, and the cutting of a batch into large writes."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

from kvstore.backend import Item
from kvstore.record import HEADER_BYTES
from kvstore.units import PAGE_BYTES, MiB

RUN_BYTES = 8 * MiB
"""Neighbours are joined up to this much payload: 4-8 MiB a write reach the device's rate, more adds only latency."""
RUN_ITEMS = 128
"""Each thread keeps a page for each header; a header and a payload each also stay below IOV_MAX of 1024."""


class Scratch:
    """Page-aligned blocks for record headers, one set a thread: direct I/O cannot use ordinary Python bytes."""

    def __init__(self) -> None:
        self._local = threading.local()

    def pages(self, count: int) -> memoryview:
        """`count` pages that belong to the calling thread until its next call."""
        block: memoryview | None = getattr(self._local, "block", None)
        if block is None or len(block) < count * PAGE_BYTES:
            size = max(16, count) * PAGE_BYTES
            block = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            self._local.block = block
        return block[: count * PAGE_BYTES]


def is_aligned(buffer: memoryview) -> bool:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


def write_all(fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Write every byte; a short write is continued. Raises OSError; then the range holds anything."""
    total = sum(view.nbytes for view in views)
    done = os.pwritev(fd, views, offset)
    while done < total:
        count = os.pwritev(fd, _skip(views, done), offset + done)
        if count <= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += count


def read_all(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill the views; returns the bytes read, fewer only at the end of the file. Raises OSError."""
    total = sum(view.nbytes for view in views)
    done = os.preadv(fd, views, offset)
    while 0 < done < total:
        count = os.preadv(fd, _skip(views, done), offset + done)
        if count <= 0:
            break
        done += count
    return done


def _skip(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left after `done` bytes. Kernels cut direct I/O at pages; other cuts fail the next call with EINVAL."""
    rest: list[memoryview] = []
    for view in views:
        if done < view.nbytes:
            rest.append(view[done:])
            done = 0
        else:
            done -= view.nbytes
    return rest


def plan_runs(
    items: Sequence[Item], candidates: Sequence[int], unit_of: dict[int, int], run_bytes: int = RUN_BYTES
) -> list[list[int]]:
    """Cut item numbers into runs of neighbours in one segment, at most `run_bytes` and RUN_ITEMS each.

    unit_of: item number -> first unit of its segment.
    """
    runs: list[list[int]] = []
    end, size, unit = -1, 0, -1
    for number in sorted(candidates, key=lambda n: items[n].place):
        item = items[number]
        length = HEADER_BYTES + item.layout.slot_bytes
        fits = runs and item.place == end and unit_of[number] == unit
        if fits and size + item.layout.slot_bytes <= run_bytes and len(runs[-1]) < RUN_ITEMS:
            runs[-1].append(number)
            size += item.layout.slot_bytes
        else:
            runs.append([number])
            size, unit = item.layout.slot_bytes, unit_of[number]
        end = item.place + length
    return runs
