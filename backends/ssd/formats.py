"""The small fixed blocks of a volume on disk: superblock, segment header, tombstone (table in docs/formats.md).

All integers are little-endian; every block ends in an xxh3 checksum over what precedes it. The record header that
precedes each chunk is `kvstore.record`. Pure; thread-safe.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvstore.errors import Corrupt, Invalid
from kvstore.units import PAGE_BYTES

FORMAT_VERSION = 1
"""Of the whole volume: superblock, segment files, index and tombstones."""

_SUPER = struct.Struct("<8sII16sQQ")
"""magic, version, reserved, volume id, unit bytes, sequence ceiling."""
_SUPER_MAGIC = b"KVSVOL\x00\x01"
_SEGMENT = struct.Struct("<8sII16sQQQQ")
"""magic, version, flags, volume id, first unit, units, unit bytes, stride (0 = serves no slot size yet)."""
_SEGMENT_MAGIC = b"KVSSEG\x00\x01"
_PREWRITTEN = 1
_TOMBSTONE = struct.Struct("<4sHH32s32sQ")
"""magic, kind, pool, root, key, sequence."""
_TOMBSTONE_MAGIC = b"KVTM"
_SUM = struct.Struct("<Q")
TOMBSTONE_BYTES = _TOMBSTONE.size + _SUM.size
KIND_ROOT, KIND_KEY = 1, 2


@dataclass(frozen=True, slots=True)
class Superblock:
    volume_id: bytes
    unit_bytes: int
    sequence_ceiling: int
    """No record on this volume has a higher sequence: a restart goes on above it, whatever the index still knows."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    volume_id: bytes
    first_unit: int
    units: int
    unit_bytes: int
    stride_bytes: int
    """Record header + slot; 0 where the segment is only allocated."""
    prewritten: bool


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Dead: every record of `root` below `sequence` (kind root), or of one identity up to `sequence` (kind key)."""

    kind: int
    root: bytes
    sequence: int
    pool: int = 0
    key: bytes = bytes(32)


def _sealed(body: bytes) -> bytes:
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def _intact(block: bytes, size: int) -> bool:
    return len(block) >= size + _SUM.size and _SUM.unpack_from(block, size)[0] == xxhash.xxh3_64_intdigest(block[:size])


def pack_superblock(block: Superblock) -> bytes:
    body = _SUPER.pack(_SUPER_MAGIC, FORMAT_VERSION, 0, block.volume_id, block.unit_bytes, block.sequence_ceiling)
    return _sealed(body)


def unpack_superblock(block: bytes, where: str) -> Superblock:
    """Raises Invalid for another format version (never misread, never overwritten), Corrupt for damage."""
    if len(block) < 12 or block[:8] != _SUPER_MAGIC:
        raise Corrupt(f"{where} is no kvstore superblock; move the folder away to start an empty volume")
    version = int.from_bytes(block[8:12], "little")
    if version != FORMAT_VERSION:
        age = "an older" if version < FORMAT_VERSION else "a newer"
        raise Invalid(
            f"{where} has {age} on-disk format {version}; this program reads and writes format {FORMAT_VERSION}"
        )
    if not _intact(block, _SUPER.size):
        raise Corrupt(f"{where} does not match its checksum; move the folder away to start an empty volume")
    _, _, _, volume_id, unit_bytes, ceiling = _SUPER.unpack_from(block)
    return Superblock(volume_id, unit_bytes, ceiling)


def pack_segment(header: SegmentHeader) -> bytes:
    """A whole 4 KiB block."""
    flags = _PREWRITTEN if header.prewritten else 0
    body = _SEGMENT.pack(
        _SEGMENT_MAGIC, FORMAT_VERSION, flags, header.volume_id, header.first_unit, header.units, header.unit_bytes,
        header.stride_bytes,
    )  # fmt: skip
    return _sealed(body).ljust(PAGE_BYTES, b"\0")


def unpack_segment(block: bytes) -> SegmentHeader | None:
    """None for anything that is not an intact header of this version."""
    if block[:8] != _SEGMENT_MAGIC or not _intact(block, _SEGMENT.size):
        return None
    _, version, flags, volume_id, first, units, unit_bytes, stride = _SEGMENT.unpack_from(block)
    if version != FORMAT_VERSION:
        return None
    return SegmentHeader(volume_id, first, units, unit_bytes, stride, bool(flags & _PREWRITTEN))


def pack_tombstone(stone: Tombstone) -> bytes:
    return _sealed(_TOMBSTONE.pack(_TOMBSTONE_MAGIC, stone.kind, stone.pool, stone.root, stone.key, stone.sequence))


def unpack_tombstone(block: bytes) -> Tombstone | None:
    """None for a torn or damaged record."""
    if block[:4] != _TOMBSTONE_MAGIC or not _intact(block, _TOMBSTONE.size):
        return None
    _, kind, pool, root, key, sequence = _TOMBSTONE.unpack_from(block)
    return Tombstone(kind, root, sequence, pool, key)
