"""The one interface of storage below DRAM: six verbs over whole chunks. Implementations live in backends/.

Rules for every implementation (the conformance suite `kvstore.testing` checks them):
- The caller owns all buffers, keeps them untouched until the call returns, and has them back then, also on failure.
- Methods block and are called from pool threads or worker processes, several at once; none touches an event loop.
- OS and network errors are mapped to `kvstore.errors` here, once. Absence is a value, corruption is `Corrupt`.
- Data is deleted only on proven corruption or on request; EMFILE or EIO never deletes anything.
- `close` is idempotent; afterwards every verb raises Closed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvstore.errors import KVStoreError
from kvstore.keys import NO_PARENT
from kvstore.layout import SlotLayout


@dataclass(frozen=True, slots=True)
class Item:
    """One chunk as a backend sees it.

    `place` is the byte offset that the planner chose for it; meaningful where `Backend.slotted`, else 0.
    `sequence` rises with every write of a daemon, across restarts: of two records of one identity the higher wins.
    """

    root: bytes
    pool: int
    key: bytes
    layout: SlotLayout
    parent: bytes = NO_PARENT
    place: int = 0
    sequence: int = 0

    def at(self, place: int, sequence: int) -> Item:
        return replace(self, place=place, sequence=sequence)


class Backend(ABC):
    """A tier below DRAM."""

    slotted: bool = False
    """True where the caller assigns places (SSD volumes), False where the key is the address (S3, shared folders)."""

    @abstractmethod
    def read_into(self, item: Item, buffer: memoryview, on_group: Callable[[int], None] | None = None) -> bool:
        """Read one chunk and verify it against its identity before it counts.

        buffer: writable, `item.layout.slot_bytes` long, 4 KiB-aligned for a direct path. With `on_group` the groups
        are read, verified and reported one after another (argument: the group's number), else all at once.
        Returns False where no such record is there (then the buffer's bytes are undefined).
        Raises Corrupt (proven), Unavailable, Throttled, Closed.
        """

    @abstractmethod
    def write(
        self, items: Sequence[Item], buffers: Sequence[memoryview], durable: bool = False
    ) -> list[KVStoreError | None]:
        """Write whole chunks, each whole or not at all after any crash; neighbours go out in one device write.

        Returns one result an item: None = stored. `durable`: on return the stored ones survive a power cut.
        Checksums are taken here over the bytes that are written. Raises Closed only.
        """

    @abstractmethod
    def contains(self, items: Sequence[Item]) -> list[bool]:
        """Which records are there under exactly this identity (and place). Payload is not verified."""

    @abstractmethod
    def delete(self, items: Sequence[Item]) -> None:
        """Remove records durably: none of them comes back after a crash. Absent ones are fine."""

    @abstractmethod
    def scan(self) -> Iterator[Item]:
        """Every live record, any order. For tests, fsck and tools; a tier may have a faster way at start."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent."""
