"""The SSD record header: 4 KiB before a chunk's payload, checksummed, identity inside (docs/formats.md).

Checksums are taken over the bytes written and cover identity and address too (seed), so a torn, lost, flipped or
misdirected write is found on read. xxh3_128 guards against corruption; it is no MAC. Pure; thread-safe.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvstore.errors import Corrupt
from kvstore.layout import MAX_EXTENTS, SlotLayout

HEADER_BYTES = 4096
MAGIC = b"KVSLOT\x00\x01"
VERSION = 1
_FIXED = struct.Struct("<8sHHIQQQ32s32s32sQ")
"""magic, version, extents, pool, sequence, place, payload bytes, root, key, parent, reserved."""
_EXTENT = struct.Struct("<QQ16s")
_SUM_BYTES = 16
DEAD = bytes(HEADER_BYTES)
"""What `rm` writes over a header."""

assert _FIXED.size + MAX_EXTENTS * _EXTENT.size + _SUM_BYTES <= HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """What a record says of itself. `place` is its own byte offset in the volume: a swapped record is found out."""

    root: bytes
    pool: int
    key: bytes
    parent: bytes
    sequence: int
    place: int
    payload_bytes: int
    extents: tuple[tuple[int, int], ...]
    """(offset from the start of the payload, length) of each checksummed range."""
    sums: tuple[bytes, ...]
    """xxh3_128 of each range, 16 bytes, seeded by identity and place."""


def extents_of(layout: SlotLayout) -> tuple[tuple[int, int], ...]:
    """All checksummed ranges of a slot, in group order."""
    return tuple(extent for group in layout.groups for extent in group.extents)


def seed(root: bytes, pool: int, key: bytes, sequence: int, place: int) -> int:
    """64-bit checksum seed that binds payload bytes to their identity, age and address."""
    return xxhash.xxh3_64_intdigest(root + key + struct.pack("<IQQ", pool, sequence, place))


def sum_extents(payload: memoryview, extents: Sequence[tuple[int, int]], seed_: int) -> tuple[bytes, ...]:
    """Checksum each range of `payload`; releases the GIL for large ranges."""
    return tuple(xxhash.xxh3_128_digest(payload[offset : offset + length], seed_) for offset, length in extents)


def pack(header: Header) -> bytes:
    """A whole 4 KiB block."""
    body = _FIXED.pack(
        MAGIC, VERSION, len(header.extents), header.pool, header.sequence, header.place, header.payload_bytes,
        header.root, header.key, header.parent, 0,
    )  # fmt: skip
    body += b"".join(_EXTENT.pack(o, n, s) for (o, n), s in zip(header.extents, header.sums, strict=True))
    return (body + xxhash.xxh3_128_digest(body)).ljust(HEADER_BYTES, b"\0")


def unpack(block: bytes | memoryview) -> Header | None:
    """None for a block that never was a record or is dead (all zero); raises Corrupt where one was damaged."""
    if len(block) < HEADER_BYTES:
        raise Corrupt(f"record header of {len(block)} bytes, expected {HEADER_BYTES}")
    head = bytes(block[: _FIXED.size])
    magic, version, count, pool, sequence, place, size, root, key, parent, _ = _FIXED.unpack(head)
    if head == DEAD[: _FIXED.size]:
        return None
    if magic != MAGIC:
        raise Corrupt("record header has a wrong magic number")
    if version != VERSION:
        raise Corrupt(f"record header has format version {version}, this program reads {VERSION}")
    if count > MAX_EXTENTS:
        raise Corrupt(f"record header claims {count} extents")
    end = _FIXED.size + count * _EXTENT.size
    body = bytes(block[:end])
    if xxhash.xxh3_128_digest(body) != bytes(block[end : end + _SUM_BYTES]):
        raise Corrupt("record header does not match its checksum")
    rows = [_EXTENT.unpack_from(body, _FIXED.size + i * _EXTENT.size) for i in range(count)]
    return Header(
        root, pool, key, parent, sequence, place, size,
        tuple((o, n) for o, n, _ in rows), tuple(s for _, _, s in rows),
    )  # fmt: skip
