"""What a policy sees and what it must answer. One policy object rules one tier.

A policy never touches data: it is told which rows are in its tier and names victims. It may name only rows that are
members, have no child in the tier (leaves first) and are not held; orphans come before everything else.
Pure and not thread-safe: called from the loop only, with keys, bytes, clock and hints as its whole world.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Rows(Protocol):
    """The columns of the index that policies may read. Arrays are replaced when the index grows: never keep one."""

    parent: npt.NDArray[np.int32]
    """Row of the previous chunk of the chain; -1 for none."""
    tick: npt.NDArray[np.int64]
    """Logical time of the last access; written by the planner on the chain's tail only."""


class EvictionPolicy(ABC):
    """`size_class`: slot bytes of a row. `held(row)`: pinned or busy, never to be named; when that ends, `released`."""

    @abstractmethod
    def __init__(self, rows: Rows, size_class: Callable[[int], int], held: Callable[[int], Any]) -> None: ...

    @abstractmethod
    def added(self, rows: Sequence[int]) -> None:
        """These rows became members, parents before children where both are new."""

    def added_all(self, rows: npt.NDArray[np.intp], size_class: int) -> None:
        """Many rows of one size class, parents included (recovery). Override where a vector form is faster."""
        self.added(rows.tolist())

    @abstractmethod
    def removed(self, row: int) -> None:
        """This row is no member any more, for whatever reason."""

    @abstractmethod
    def released(self, rows: npt.NDArray[np.intp]) -> None:
        """These rows are not held any more (rows that are no members are ignored)."""

    def released_one(self, row: int) -> None:
        """As `released`. Override where one row alone is cheaper: each end of an I/O calls it."""
        self.released(np.array([row]))

    @abstractmethod
    def unlinked(self, row: int) -> None:
        """The row's parent (still set) is leaving the system: the row loses it."""

    @abstractmethod
    def orphaned(self, row: int) -> None:
        """The row was unlinked, and its pool asks for whole chains: nothing can reach it any more, so it goes first."""

    @abstractmethod
    def relinked(self, row: int) -> None:
        """The row got a (new) parent after it became a member."""

    @abstractmethod
    def has_children(self, row: int) -> bool:
        """Whether a member has this row as its parent."""

    @abstractmethod
    def victim(self, size_class: int) -> int | None:
        """The member of this size class to evict next, or None. The caller evicts it and calls `removed`."""

    @abstractmethod
    def oldest(self, size_class: int) -> int | None:
        """Tick of the row that `victim` would name: compares classes with one another."""
