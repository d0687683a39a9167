"""What the planner asks the I/O threads to do: plain data, no references into the planner."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.backend import Item
from kvstore.index import Series


@dataclass(slots=True, eq=False)
class Read:
    """Fill one arena slot from a volume. `generation` is the slot's while the fill lasts."""

    row: int
    volume: int
    item: Item
    offset: int
    generation: int
    layerwise: bool = False


@dataclass(slots=True, eq=False)
class Write:
    """Write one arena slot to its place on a volume."""

    row: int
    volume: int
    item: Item
    offset: int
    segment: tuple[int, int, int]
    """(first unit, units, stride) of the segment that must exist before."""
    retried: bool = False


@dataclass(slots=True, eq=False)
class Delete:
    """Remove one record durably; its place is free afterwards."""

    volume: int
    item: Item


@dataclass(slots=True)
class Work:
    """Instructions that one event produced."""

    reads: list[Read] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    deletes: list[Delete] = field(default_factory=list)
    ahead: tuple[Series, int, int] | None = None
    """A next batch like this one is likely: (series, slots to prepare once the answer is out, tick before it)."""
