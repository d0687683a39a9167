"""Bring back what a volume holds: from its columns straight into the index, without a loop over the cold part.

Target: 1 M records in 2 s. Making the key objects and the series' dict is all that is left in Python.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.index import NOWHERE, Root, Series, ssd_location
from kvstore.keys import KEY_BYTES
from kvstore.planner.state import State
from kvstore.record import HEADER_BYTES


class Loaded(Protocol):
    """What a volume's `load` returns; see backends/ssd. Arrays have one entry a record."""

    segments: list[tuple[int, int]]
    roots: list[bytes]
    root_number: npt.NDArray[np.uint32]
    pool: npt.NDArray[np.uint16]
    place: npt.NDArray[np.uint64]
    sequence: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint8]
    parents: npt.NDArray[np.uint8]
    max_sequence: int
    descriptions: dict[bytes, bytes]


class Recovery:
    def __init__(self, state: State) -> None:
        self._state = state

    def root(self, digest: bytes, description: bytes = b"{}") -> Root:
        """The root of this digest, new or known."""
        state = self._state
        root = state.roots.get(digest)
        if root is None:
            root = Root(digest, state.number(), description)
            state.roots[digest] = root
            state.handles[root.handle] = root
        return root

    def collect_roots(self) -> int:
        """Forget roots that nobody has open and nothing names any more; returns how many.

        Salts and tenants make many roots, most of them for one look-up. One scan over all rows: called when the number
        of roots has doubled, not for each.
        """
        state = self._state
        named = set(state.columns.series_in_use())
        opened = {handle for session in state.sessions.values() for handle in session.roots}
        gone = [
            root
            for root in state.roots.values()
            if root.handle not in opened
            and not any(s.number in named or s.pending or s.waiting for s in root.series.values())
        ]
        for root in gone:
            del state.roots[root.digest], state.handles[root.handle]
            state.free_series.extend(series.number for series in root.series.values())
        return len(gone)

    def series(self, root: Root, pool: int, slot_bytes: int) -> Series:
        """The series of this pool; its slot size is fixed by the root's digest."""
        found = root.series.get(pool)
        if found is None:
            state = self._state
            number = state.free_series.pop() if state.free_series else len(state.series)
            found = root.series[pool] = Series(number, root.digest, pool, slot_bytes)
            state.series[number : number + 1] = [found]
        return found

    def restore(self, volume: int, loaded: Loaded) -> int:
        """Adopt one volume's segments and records. Returns how many chunks came back that were not known yet."""
        state = self._state
        state.next_sequence = max(state.next_sequence, loaded.max_sequence + 1)
        slab = state.ssd.slabs[volume]
        place = loaded.place.astype(np.int64)
        stride = np.zeros(slab.units, np.int64)
        first_unit = np.full(slab.units, -1, np.int64)
        for first, size in loaded.segments:
            stride[first : first + slab.units_for(size)] = size
            first_unit[first : first + slab.units_for(size)] = first
        home = first_unit[place // slab.unit_bytes]
        series_number = self._series_of(loaded, stride[place // slab.unit_bytes])
        keep, moved = self._not_known(series_number, loaded)
        lives = keep.copy()
        lives[[at for at, _ in moved]] = True
        for first, size in loaded.segments:
            base = first * slab.unit_bytes + slab.header_bytes
            slab.adopt(first, size, ((place[lives & (home == first)] - base) // size).tolist())
        for at, row in moved:
            state.ssd.free(int(state.columns.ssd[row]))
            state.columns.ssd[row] = ssd_location(volume, int(place[at]))
            state.columns.sequence[row] = int(loaded.sequence[at])
        self._add(volume, loaded, place, series_number, keep)
        return int(keep.sum())

    def _series_of(self, loaded: Loaded, stride: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Series number of each record, made where the root or pool is new."""
        pair = loaded.root_number.astype(np.int64) << 16 | loaded.pool
        pairs, first, inverse = np.unique(pair, return_index=True, return_inverse=True)
        numbers = np.zeros(len(pairs), np.uint32)
        for i, (code, at) in enumerate(zip(pairs.tolist(), first.tolist(), strict=True)):
            digest = loaded.roots[code >> 16]
            root = self.root(digest, loaded.descriptions.get(digest, b"{}"))
            numbers[i] = self.series(root, code & 0xFFFF, int(stride[at]) - HEADER_BYTES).number
        return numbers[inverse]

    def _not_known(
        self, series_number: npt.NDArray[np.uint32], loaded: Loaded
    ) -> tuple[npt.NDArray[np.bool_], list[tuple[int, int]]]:
        """False for chunks that another volume has brought already; and which of those are newer here.

        A chunk evicted from one volume and stored again on another is on both: the higher sequence wins.
        """
        keep = np.ones(len(series_number), bool)
        newer: list[tuple[int, int]] = []
        if len(self._state.columns):
            packed = loaded.keys.tobytes()
            for i, number in enumerate(series_number.tolist()):
                row = self._state.series[number].rows.get(packed[i * KEY_BYTES : (i + 1) * KEY_BYTES])
                if row is not None:
                    keep[i] = False
                    if loaded.sequence[i] > self._state.columns.sequence[row]:
                        newer.append((i, row))
        return keep, newer

    def _add(
        self,
        volume: int,
        loaded: Loaded,
        place: npt.NDArray[np.int64],
        series_number: npt.NDArray[np.uint32],
        keep: npt.NDArray[np.bool_],
    ) -> None:
        state, columns = self._state, self._state.columns
        order = np.nonzero(keep)[0]
        order = order[np.argsort(loaded.sequence[order], kind="stable")]
        key_bytes = np.ascontiguousarray(loaded.keys[order])
        keys = _split(key_bytes)
        numbers = series_number[order]
        first = columns.extend(numbers, keys)
        end = first + len(order)
        columns.ssd[first:end] = place[order] + ssd_location(volume, 0)
        columns.sequence[first:end] = loaded.sequence[order].astype(np.int64)
        columns.tick[first:end] = np.arange(1, len(order) + 1)
        state.advance(len(order) + 1)
        for number in np.unique(numbers).tolist():
            mine = np.nonzero(numbers == number)[0]
            rows = range(first, end) if len(mine) == len(keys) else (mine + first).tolist()
            names = keys if len(mine) == len(keys) else [keys[i] for i in mine.tolist()]
            state.series[number].rows.update(zip(names, rows, strict=True))
        self._link(first, np.ascontiguousarray(loaded.parents[order]), key_bytes, numbers)
        for number in np.unique(numbers).tolist():
            series = state.series[number]
            state.ssd.policy.added_all(np.nonzero(numbers == number)[0] + first, series.slot_bytes + HEADER_BYTES)

    def relink(self) -> None:
        """After the last volume: orphans whose parents came from another one."""
        state = self._state
        for series in state.series:
            for missing in [m for m in series.waiting if m in series.rows]:
                state.adopt_children(series, series.rows[missing], missing)

    def _link(
        self,
        first: int,
        parents: npt.NDArray[np.uint8],
        keys: npt.NDArray[np.uint8],
        numbers: npt.NDArray[np.uint32],
    ) -> None:
        """Join parents to rows by 8 key bytes, then confirm all 32; what is not found here is looked up one by one."""
        state, columns = self._state, self._state.columns
        if not len(keys):
            return
        short = keys[:, :8].copy().view(np.uint64).ravel()
        wanted = parents[:, :8].copy().view(np.uint64).ravel()
        by_key = np.argsort(short)
        at = np.minimum(np.searchsorted(short[by_key], wanted), len(short) - 1)
        candidate = by_key[at]
        good = (keys[candidate] == parents).all(axis=1) & (numbers[candidate] == numbers)
        rows = np.where(good, candidate + first, NOWHERE)
        columns.parent[first : first + len(keys)] = rows
        lonely = np.nonzero(~good & parents.any(axis=1))[0]
        for i in lonely.tolist():
            state.orphan(state.series[int(numbers[i])], first + i, parents[i].tobytes())


def _split(keys: npt.NDArray[np.uint8]) -> list[bytes]:
    """Rows of an (n, 32) array as bytes objects, without a numpy object a row."""
    packed = keys.tobytes()
    return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]
