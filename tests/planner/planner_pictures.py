"""What the planner's instructions do to memory and disk, as plain pictures: the model test's own idea of the bytes.

A page of 4 KiB is one Stamp: whose it is, which page of the chunk, and in which store it was written. Nothing here
knows the planner: it is told what an I/O thread or an engine would do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.backend import Item
from kvstore.record import HEADER_BYTES
from kvstore.units import PAGE_BYTES


class Identity(NamedTuple):
    root: bytes
    pool: int
    key: bytes


class Stamp(NamedTuple):
    identity: Identity
    page: int
    """Within the chunk's slot."""
    version: int
    """Number of the store that wrote it; torn bytes have none and are None as a whole."""


class ArenaPicture:
    def __init__(self, pages: int) -> None:
        self.pages: list[Stamp | None] = [None] * pages

    def tear(self, pages: range) -> None:
        """Somebody is writing: the bytes are nobody's."""
        for page in pages:
            self.pages[page] = None

    def read(self, offset: int, size_bytes: int) -> list[Stamp | None]:
        first = offset // PAGE_BYTES
        return self.pages[first : first + size_bytes // PAGE_BYTES]

    def write(self, offset: int, stamps: list[Stamp | None]) -> None:
        first = offset // PAGE_BYTES
        self.pages[first : first + len(stamps)] = stamps


@dataclass
class Record:
    identity: Identity
    parent: bytes
    sequence: int
    stamps: list[Stamp | None]
    damaged: bool = False


@dataclass
class Loaded:
    """The columns that a volume's `load` gives (planner/recovery.py names them)."""

    segments: list[tuple[int, int]]
    roots: list[bytes]
    root_number: npt.NDArray[np.uint32]
    pool: npt.NDArray[np.uint16]
    place: npt.NDArray[np.uint64]
    sequence: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint8]
    parents: npt.NDArray[np.uint8]
    max_sequence: int
    descriptions: dict[bytes, bytes] = field(default_factory=dict)


def loaded(segments: list[tuple[int, int]], records: dict[int, Record], max_sequence: int) -> Loaded:
    """`records` by place."""
    roots = sorted({record.identity.root for record in records.values()})
    found = list(records.values())
    return Loaded(
        segments,
        roots,
        np.array([roots.index(r.identity.root) for r in found], np.uint32),
        np.array([r.identity.pool for r in found], np.uint16),
        np.array(list(records), np.uint64),
        np.array([r.sequence for r in found], np.uint64),
        np.frombuffer(b"".join(r.identity.key for r in found), np.uint8).reshape(-1, 32),
        np.frombuffer(b"".join(r.parent for r in found), np.uint8).reshape(-1, 32),
        max_sequence,
    )


class DiskPicture:
    """One volume. Evictions leave records where they are, as on a real disk: writes, formats and deletes end them."""

    def __init__(self, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self.records: dict[int, Record] = {}
        self.shapes: dict[int, tuple[int, int]] = {}
        """First unit -> (units, stride)."""
        self.dead_roots: dict[bytes, int] = {}
        self.dead_keys: dict[Identity, int] = {}
        self.max_sequence = 0

    def format(self, first_unit: int, units: int, stride: int) -> list[int]:
        """The segment serves this stride; returns the places of records that are overwritten by that."""
        if self.shapes.get(first_unit) == (units, stride):
            return []
        units_gone = set(range(first_unit, first_unit + units))
        for first, (count, _) in list(self.shapes.items()):
            if units_gone & set(range(first, first + count)):
                units_gone |= set(range(first, first + count))  # the old segment goes as a whole
                del self.shapes[first]
        self.shapes[first_unit] = (units, stride)
        gone = [p for p in self.records if p // self.unit_bytes in units_gone]
        for place in gone:
            del self.records[place]
        return gone

    def write(self, item: Item, stamps: list[Stamp | None]) -> None:
        self.max_sequence = max(self.max_sequence, item.sequence)
        identity = Identity(item.root, item.pool, item.key)
        self.records[item.place] = Record(identity, item.parent, item.sequence, stamps)

    def find(self, item: Item) -> Record | None:
        """The record that a read of `item` finds: exactly its identity and sequence, not killed by a tombstone."""
        record = self.records.get(item.place)
        wanted = (Identity(item.root, item.pool, item.key), item.sequence)
        if record is None or (record.identity, record.sequence) != wanted or self.dead(record):
            return None
        return record

    def dead(self, record: Record) -> bool:
        return record.sequence < self.dead_roots.get(record.identity.root, 0) or record.sequence <= self.dead_keys.get(
            record.identity, -1
        )

    def delete(self, item: Item) -> None:
        identity = Identity(item.root, item.pool, item.key)
        self.dead_keys[identity] = max(item.sequence, self.dead_keys.get(identity, -1))
        self.records = {p: r for p, r in self.records.items() if r.identity != identity or r.sequence > item.sequence}

    def load(self) -> Loaded:
        """Newest living record of each identity, as the real volume answers."""
        newest: dict[Identity, int] = {}
        for place, record in self.records.items():
            known = newest.get(record.identity)
            if not self.dead(record) and (known is None or self.records[known].sequence < record.sequence):
                newest[record.identity] = place
        segments = sorted((first, stride) for first, (_, stride) in self.shapes.items())
        top = max([self.max_sequence, *self.dead_roots.values(), *self.dead_keys.values()])
        return loaded(segments, {p: self.records[p] for p in newest.values()}, top)


def stride_of(slot_bytes: int) -> int:
    return slot_bytes + HEADER_BYTES
