"""Columns of records at start, and the rules that decide which of them live. Pure numpy; not thread-safe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.backends.ssd.catalog import ROW_DTYPE
from kvstore.backends.ssd.segments import SEGMENT_HEADER_BYTES, SegmentFiles
from kvstore.backends.ssd.tombstones import Tombstones


@dataclass(slots=True)
class Loaded:
    """One row a live record; `root_number` indexes `roots`. Arrays are owned by the caller."""

    segments: list[tuple[int, int]]
    """(first unit, stride in bytes) of each segment that serves a slot size."""
    roots: list[bytes]
    root_number: npt.NDArray[np.uint32]
    pool: npt.NDArray[np.uint16]
    place: npt.NDArray[np.uint64]
    sequence: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint8]
    """(n, 32)"""
    parents: npt.NDArray[np.uint8]
    """(n, 32)"""
    max_sequence: int = 0
    """No record of this volume, live or dead, has a higher one."""
    descriptions: dict[bytes, bytes] = field(default_factory=dict)
    rebuilt: bool = False
    """True where the index was lost and the record headers were read instead."""
    dropped: int = 0
    """Records left out: damaged header, purged, removed, older copy of the same identity, off the grid."""

    def __len__(self) -> int:
        return len(self.place)


class Columns:
    """Grows by chunks of rows: only the columns stay in memory, never a second copy of the rows."""

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self._capacity = max(1024, capacity)
        self._arrays = {name: self._empty(name, self._capacity) for name in ROW_DTYPE.names or () if name != "reserved"}

    @staticmethod
    def _empty(name: str, count: int) -> npt.NDArray[Any]:
        dtype, shape = ROW_DTYPE[name].base, ROW_DTYPE[name].shape
        return np.empty((count, *shape), dtype)

    def extend(self, rows: npt.NDArray[np.void]) -> None:
        end = self.count + len(rows)
        if end > self._capacity:
            self._capacity = max(end, self._capacity * 3 // 2)
            for name, old in self._arrays.items():
                self._arrays[name] = self._empty(name, self._capacity)
                self._arrays[name][: self.count] = old[: self.count]
        for name, array in self._arrays.items():
            array[self.count : end] = rows[name]
        self.count = end

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name][: self.count]

    def keep(self, mask: npt.NDArray[np.bool_]) -> None:
        for name in self._arrays:
            self._arrays[name] = self[name][mask]
        self.count = self._capacity = int(mask.sum())


@dataclass(slots=True)
class Settled:
    loaded: Loaded
    dead: npt.NDArray[np.uint64]
    """Places of the rows that do not live: the index need not keep them."""
    removed: list[int]
    """Those of them that a removed key's tombstone killed: their headers may still be on disk."""


def settle(columns: Columns, numbers: dict[bytes, int], segments: SegmentFiles, stones: Tombstones) -> Settled:
    """Places on the grid only, known roots only, tombstones honoured, newest sequence of one identity wins.

    numbers: root -> number in `columns`. Takes the columns over.
    """
    top = int(columns["sequence"].max(initial=0))
    number = columns["root_number"]
    alive = _on_grid(columns["place"], segments)
    known = np.zeros(max(numbers.values(), default=-1) + 2, bool)
    known[list(numbers.values())] = True
    alive &= known[np.minimum(number, len(known) - 1)]
    for root, below in stones.roots.items():
        if root in numbers:
            alive &= (number != numbers[root]) | (columns["sequence"] >= np.uint64(below))
    removed = _removed_rows(columns, numbers, stones) & alive
    alive &= ~removed
    alive[_older_copies(columns, alive)] = False
    removed_places = columns["place"][removed].tolist()
    dead = columns["place"][~alive]
    if len(dead):
        columns.keep(alive)
    used = np.flatnonzero(np.bincount(columns["root_number"], minlength=1))
    used = used if columns.count else used[:0]
    by_number = {n: root for root, n in numbers.items()}
    dense = np.zeros(len(known), np.uint32)
    dense[used] = np.arange(len(used), dtype=np.uint32)
    loaded = Loaded(
        segments=[(s.first_unit, s.stride_bytes) for s in segments.all() if s.stride_bytes],
        roots=[by_number[n] for n in used.tolist()],
        root_number=dense[columns["root_number"]],
        pool=columns["pool"],
        place=columns["place"],
        sequence=columns["sequence"],
        keys=columns["key"],
        parents=columns["parent"],
        max_sequence=max(top, stones.max_sequence()),
        dropped=len(dead),
    )
    return Settled(loaded, dead, removed_places)


def _on_grid(place: npt.NDArray[np.uint64], segments: SegmentFiles) -> npt.NDArray[np.bool_]:
    """Which places are slots of a formatted segment."""
    formatted = [s for s in segments.all() if s.stride_bytes]
    if not formatted or not len(place):
        return np.zeros(len(place), bool)
    bases = np.array([segments.base(s) + SEGMENT_HEADER_BYTES for s in formatted], np.uint64)
    strides = np.array([s.stride_bytes for s in formatted], np.uint64)
    slots = np.array([segments.slots(s) for s in formatted], np.uint64)
    row = np.searchsorted(bases, place, side="right").astype(np.int64) - 1
    inside = row >= 0
    row[~inside] = 0
    offset = place - bases[row]
    stride = strides[row]
    good: npt.NDArray[np.bool_] = inside & (offset % stride == 0) & (offset // stride < slots[row])
    return good


def _identity_hash(columns: Columns) -> npt.NDArray[np.uint64]:
    """Equal identities have equal hashes; the reverse is checked by the caller."""
    head = np.ascontiguousarray(columns["key"][:, :8]).view("<u8").reshape(-1).astype(np.uint64, copy=False)
    spread = columns["root_number"].astype(np.uint64) * np.uint64(65536) + columns["pool"].astype(np.uint64)
    mixed: npt.NDArray[np.uint64] = head ^ (spread * np.uint64(0x9E3779B97F4A7C15))
    return mixed


def _older_copies(columns: Columns, alive: npt.NDArray[np.bool_]) -> list[int]:
    """Rows whose identity is there again with a higher sequence (a chunk evicted and stored again elsewhere)."""
    hashes = _identity_hash(columns)
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    same = ordered[1:] == ordered[:-1]
    suspects = np.unique(np.concatenate((order[1:][same], order[:-1][same])))
    newest: dict[tuple[int, int, bytes], int] = {}
    losers: list[int] = []
    sequence = columns["sequence"]
    for row in suspects.tolist():
        if not alive[row]:
            continue
        identity = _identity(columns, row)
        best = newest.get(identity)
        if best is None:
            newest[identity] = row
        else:
            loser = row if sequence[row] <= sequence[best] else best
            newest[identity] = best if loser == row else row
            losers.append(loser)
    return losers


def _removed_rows(columns: Columns, numbers: dict[bytes, int], stones: Tombstones) -> npt.NDArray[np.bool_]:
    """Rows killed by a key tombstone."""
    dead = np.zeros(columns.count, bool)
    heads = {key[:8] for _, _, key in stones.keys}
    if not heads or not columns.count:
        return dead
    wanted = np.frombuffer(b"".join(sorted(heads)), "<u8")
    by_number = {n: root for root, n in numbers.items()}
    head = np.ascontiguousarray(columns["key"][:, :8]).view("<u8").reshape(-1)
    for row in np.flatnonzero(np.isin(head, wanted)).tolist():
        number, pool, key = _identity(columns, row)
        root = by_number.get(number)
        limit = stones.keys.get((root, pool, key)) if root is not None else None
        dead[row] = limit is not None and int(columns["sequence"][row]) <= limit
    return dead


def _identity(columns: Columns, row: int) -> tuple[int, int, bytes]:
    return int(columns["root_number"][row]), int(columns["pool"][row]), columns["key"][row].tobytes()
