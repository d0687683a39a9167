"""One row a chunk, in numpy columns: about 55 bytes a chunk, and vector operations for a batch of rows.

Measured (design prototype): dict + key + columns 214-280 bytes a chunk, a 64-key look-up 27-31 us; RocksDB itself would
take 390 us. Columns grow by doubling, so a reference to one must not be kept over an `add`. Not thread-safe.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NOWHERE = -1
READY, ORPHAN, DEAD, SICK = 1, 2, 4, 8
"""Flags: bytes in DRAM are complete; parent missing, hidden; removed but still held by a lease or an I/O; hidden for a
while because its tier failed to deliver it."""
BUSY_WRITE, BUSY_FILL = 1, 2
"""An I/O thread reads from, or writes into, the chunk's arena slot."""
_PLACE_BITS = 48
_FIRST_ROWS = 1024


def ssd_location(volume: int, place: int) -> int:
    """Volume number and byte offset in one int64 column."""
    return volume << _PLACE_BITS | place


def volume_of(location: int) -> int:
    return location >> _PLACE_BITS


def place_of(location: int) -> int:
    return location & ((1 << _PLACE_BITS) - 1)


class Columns:
    """`series` number, `parent` row, `tick` of last access, `dram` arena offset, `ssd` location, record `sequence`,
    `pins` by leases, `busy` and `flags` bits, and the key itself."""

    def __init__(self) -> None:
        self.series = np.zeros(_FIRST_ROWS, np.uint32)
        self.parent = np.full(_FIRST_ROWS, NOWHERE, np.int32)
        self.tick = np.zeros(_FIRST_ROWS, np.int64)
        self.dram = np.full(_FIRST_ROWS, NOWHERE, np.int64)
        self.ssd = np.full(_FIRST_ROWS, NOWHERE, np.int64)
        self.sequence = np.zeros(_FIRST_ROWS, np.int64)
        self.pins = np.zeros(_FIRST_ROWS, np.uint16)
        self.busy = np.zeros(_FIRST_ROWS, np.uint8)
        self.flags = np.zeros(_FIRST_ROWS, np.uint8)
        self.keys: list[bytes | None] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """Rows in use."""
        return len(self.keys) - len(self._free)

    def add(self, series: int, key: bytes, parent: int, tick: int) -> int:
        """A new row that is in no tier yet."""
        if self._free:
            row = self._free.pop()
            self.keys[row] = key
        else:
            row = len(self.keys)
            if row == len(self.series):
                self._resize(2 * row)
            self.keys.append(key)
        self.series[row] = series
        self.parent[row] = parent
        self.tick[row] = tick
        return row

    def extend(self, series: npt.NDArray[np.uint32], keys: list[bytes]) -> int:
        """Append many rows at once (recovery); returns the first row's number. Other columns have their defaults."""
        first = len(self.keys)
        if first + len(keys) > len(self.series):
            self._resize(first + len(keys))
        self.keys.extend(keys)
        self.series[first : first + len(keys)] = series
        return first

    def release(self, row: int) -> None:
        """The row is in no tier, not pinned and not busy: its number may be used again."""
        self.keys[row] = None
        self.parent[row] = NOWHERE
        self.dram[row] = NOWHERE
        self.ssd[row] = NOWHERE
        self.sequence[row] = 0
        self.flags[row] = 0
        self._free.append(row)

    def key(self, row: int) -> bytes:
        key = self.keys[row]
        assert key is not None, f"row {row} is free"
        return key

    def held(self, row: int) -> bool:
        """Pinned by a lease or busy with I/O: must not leave DRAM."""
        return bool(self.pins[row] or self.busy[row])

    def children(self, row: int) -> npt.NDArray[np.intp]:
        """Rows whose parent this one is: a scan, for the rare removal from the middle of a chain."""
        return np.nonzero(self.parent[: len(self.keys)] == row)[0]

    def series_in_use(self) -> list[int]:
        """Numbers of the series that a row names, removed ones that are still held included. A scan."""
        used = np.ones(len(self.keys), bool)
        used[self._free] = False
        numbers: list[int] = np.unique(self.series[: len(self.keys)][used]).tolist()
        return numbers

    def in_use(self, column: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        """Rows that have a place in `column` (dram or ssd)."""
        return np.nonzero(column[: len(self.keys)] >= 0)[0]

    def _resize(self, rows: int) -> None:
        for name, fill in (
            ("series", 0),
            ("parent", NOWHERE),
            ("tick", 0),
            ("dram", NOWHERE),
            ("ssd", NOWHERE),
            ("sequence", 0),
            ("pins", 0),
            ("busy", 0),
            ("flags", 0),
        ):
            old = getattr(self, name)
            new = np.full(rows, fill, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
