"""What the core needs of an SSD volume beyond the six verbs of `Backend`: places are chosen by the planner."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.backend import Backend, Item
from kvstore.errors import KVStoreError


class SlottedVolume(Backend):
    """A backend cut into segments of slots. The slab over it has a 4 KiB header a segment; a slot is header + payload.

    Duties of the caller: no two calls touch one place at a time; a segment is formatted or prewritten only while none
    of its slots is in use; sequences rise.
    """

    slotted = True
    path: Path
    size_bytes: int
    unit_bytes: int
    direct: bool
    notes: list[str]

    @property
    @abstractmethod
    def read_only(self) -> bool:
        """The file system turned read-only under us: reads go on, writes are Unavailable."""

    @property
    @abstractmethod
    def abandoned(self) -> frozenset[int]:
        """First units of segments that are never written again: a sync failed, or the header cannot be read."""

    @abstractmethod
    def read_many(self, items: Sequence[Item], buffers: Sequence[memoryview]) -> Sequence[bool | KVStoreError]:
        """`read_into` for several chunks, neighbours in one device read; one outcome an item. Raises Closed only."""

    @abstractmethod
    def load(self) -> Any:
        """What survived, as columns (planner/recovery.py names them). Once, before anything else."""

    @abstractmethod
    def note_root(self, digest: bytes, description: bytes) -> None:
        """Keep what a root stands for (JSON). Idempotent. Raises Full, Unavailable."""

    @abstractmethod
    def format_segment(self, first_unit: int, units: int, slot_bytes: int) -> None:
        """Make these units serve slots of `slot_bytes` (record header included). Cheap where they do already."""

    @abstractmethod
    def prewrite(self, first_unit: int, units: int) -> bool:
        """Write free units once, so that later stores run at full speed. False where that was done already."""

    @abstractmethod
    def prewritten(self, first_unit: int) -> bool: ...

    @abstractmethod
    def tombstone(self, root: bytes, sequence: int) -> None:
        """Every record of `root` below `sequence` is dead, durably on return."""

    @abstractmethod
    def space(self) -> tuple[int, int]:
        """(bytes allocated by this volume, bytes that the file system still gives). Raises Unavailable."""
