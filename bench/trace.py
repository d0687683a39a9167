"""Requests of a recorded trace, with chained keys and payload that is a function of the key.

Block ids of the trace are chained already (an equal id means an equal prefix): a block's key is the digest of its id.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

MOONCAKE = Path(__file__).with_name("traces") / "mooncake_conversation_trace.jsonl.xz"
TOKENS_PER_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Request:
    input_tokens: int
    keys: list[bytes]
    """One for each block of TOKENS_PER_BLOCK tokens, in order; the last block may be shorter."""


def load_requests(count: int, path: Path = MOONCAKE) -> list[Request]:
    """The first `count` requests, in order of arrival."""
    with lzma.open(path, "rt") as lines:
        rows = [json.loads(line) for line in islice(lines, count)]
    return [Request(row["input_length"], [block_key(number) for number in row["hash_ids"]]) for row in rows]


def block_key(number: int) -> bytes:
    return hashlib.sha256(b"mooncake-conversation\0%d" % number).digest()


class Payload:
    """The bytes of a chunk, from its key: 8-byte words that count up from a start taken from the key.

    Each word depends on the key and on its position, so swapped chunks, shifted ranges and stale pages all show.
    """

    def __init__(self, chunk_bytes: int) -> None:
        assert chunk_bytes % 8 == 0
        self._step = np.uint64(0x9E3779B97F4A7C15)
        with np.errstate(over="ignore"):
            self._words = np.arange(chunk_bytes // 8, dtype=np.uint64) * self._step
        self._work = np.empty_like(self._words)

    def fill(self, key: bytes, out: npt.NDArray[np.uint8]) -> None:
        np.add(self._words, self._start(key), out=out.view(np.uint64))

    def wrong_bytes(self, key: bytes, got: npt.NDArray[np.uint8]) -> int:
        """How many bytes differ from what `fill` made: every byte is compared."""
        np.add(self._words, self._start(key), out=self._work)
        if np.array_equal(self._work, got.view(np.uint64)):
            return 0
        return int(np.count_nonzero(self._work.view(np.uint8) != got))

    def _start(self, key: bytes) -> np.uint64:
        return np.uint64(int.from_bytes(key[:8], "little"))
