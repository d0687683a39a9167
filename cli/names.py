"""How `put NAME` maps a file of any size to chunks: the namespace, the keys and the head of the first chunk.

    chunk 0   key = SHA-256("kvstore-cli" NUL NAME); 64-byte head, then the first bytes of the file
    chunk i   key = SHA-256(key of chunk 0 + SHA-256 of the whole file + i as uint64-LE): content is part of the name,
              so that chunks left over from an earlier file of this name can never be mixed in
The head is: magic (8), length (u64-LE), SHA-256 of the file (32), zeros. All chunks are CHUNK_BYTES, the last padded.
Pure; thread-safe.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass

from kvstore.errors import Corrupt, Invalid
from kvstore.keys import chain_parents
from kvstore.layout import one_part_pool
from kvstore.namespace import BaseNamespace, root_digest
from kvstore.units import MiB

CHUNK_BYTES = MiB
MAGIC = b"KVFILE\x00\x01"
_HEAD = struct.Struct("<8sQ32s16x")
HEAD_BYTES = _HEAD.size
NAMESPACE = BaseNamespace(
    model="kvstore-cli", weights="none", key_scheme="kvstore-cli-v1", pools=(one_part_pool(CHUNK_BYTES, name="files"),)
)
ROOT = root_digest(NAMESPACE)
_HEX_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Head:
    length_bytes: int
    digest: bytes

    @property
    def chunks(self) -> int:
        return -(-(HEAD_BYTES + self.length_bytes) // CHUNK_BYTES)

    def encode(self) -> bytes:
        return _HEAD.pack(MAGIC, self.length_bytes, self.digest)

    @classmethod
    def decode(cls, data: bytes) -> Head:
        magic, length, digest = _HEAD.unpack(data[:HEAD_BYTES])
        if magic != MAGIC:
            raise Corrupt("the chunk of that name does not begin like a file that `kvstore put` stored")
        return cls(length, digest)


def first_key(name: str) -> bytes:
    if not name:
        raise Invalid("a name must not be empty")
    return hashlib.sha256(b"kvstore-cli\0" + name.encode("utf-8", "surrogateescape")).digest()


def all_keys(name: str, head: Head) -> list[bytes]:
    first = first_key(name)
    rest = [hashlib.sha256(first + head.digest + struct.pack("<Q", i)).digest() for i in range(1, head.chunks)]
    return [first, *rest]


def parents_of(keys: list[bytes]) -> list[bytes]:
    return chain_parents(keys)


def key_of(text: str) -> tuple[bytes, bool]:
    """(key, is a name): 64 hexadecimal digits are a chunk's key, anything else a name given to `put`."""
    if _HEX_KEY.fullmatch(text.lower()):
        return bytes.fromhex(text), False
    return first_key(text), True
