"""Chained keys: a key names all tokens up to its chunk's end, so equal keys mean equal prefixes.

key[i] = SHA-256(key[i-1] || token ids of chunk i as uint32-LE), key[-1] = SHA-256(seed): the scheme `KEY_SCHEME`.
Engines that have a full-length block hash of their own pass that instead and name its scheme in the namespace.
Keys travel as ONE bytes field of n x 32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.errors import Invalid

KEY_BYTES = 32
KEY_SCHEME = "kvstore-sha256-u32le-v1"
NO_PARENT = bytes(KEY_BYTES)
"""Parent of a chain's first chunk."""


def chain_keys(
    token_ids: Sequence[int] | npt.NDArray[np.integer], tokens_per_chunk: int, seed: bytes = b""
) -> list[bytes]:
    """Keys of all WHOLE chunks of `token_ids`, in order; a tail shorter than a chunk has none.

    Raises Invalid for a token id outside 0..2**32-1. Thread-safe.
    """
    if tokens_per_chunk < 1:
        raise Invalid(f"tokens_per_chunk must be at least 1, not {tokens_per_chunk}")
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1:
        raise Invalid(f"token ids are one sequence, not an array of {tokens.ndim} dimensions")
    if tokens.size and (tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() > 0xFFFFFFFF):
        raise Invalid("token ids must be integers in 0..4294967295")
    packed = tokens.astype("<u4").tobytes()
    step = tokens_per_chunk * 4
    keys: list[bytes] = []
    key = hashlib.sha256(seed).digest()
    for start in range(0, len(packed) - step + 1, step):
        key = hashlib.sha256(key + packed[start : start + step]).digest()
        keys.append(key)
    return keys


def chain_parents(keys: Sequence[bytes], parent: bytes = NO_PARENT) -> list[bytes]:
    """The parent of each key of one chain, whose first chunk follows `parent`."""
    return [parent, *keys[:-1]] if keys else []


def join_keys(keys: Iterable[bytes]) -> bytes:
    return b"".join(keys)


def split_keys(packed: bytes) -> list[bytes]:
    """Inverse of `join_keys`. Raises Invalid where the length is not a multiple of 32."""
    if len(packed) % KEY_BYTES:
        raise Invalid(f"keys take {KEY_BYTES} bytes each; got {len(packed)} bytes")
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
