"""KV stored by one engine process comes back in a fresh one: same tokens, and bit by bit what the engine's own prefix
cache would have given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
from engine_process import EngineProcess

from kvstore.testing.daemon import DaemonProcess

pytestmark = pytest.mark.timeout(300)
CHUNK_TOKENS = 64
PROMPT = tiny_models.prompt_token_ids(270)
HIT = 256
"""Whole chunks of PROMPT, and whole blocks of what the engine may hit of it: the two hits have equal length."""


def options(daemon: DaemonProcess, **more: object) -> dict[str, object]:
    return {"socket_path": str(daemon.socket_path), "chunk_tokens": CHUNK_TOKENS, "lookup_timeout_s": 1.0} | more


def largest_difference(left: dict, right: dict) -> float:
    pairs = zip(left["logprobs"], right["logprobs"], strict=True)
    return max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())


def test_a_fresh_process_gets_the_bytes_and_the_tokens(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    daemon = make_daemon()
    model = tiny_models.llama().folder()
    other = [(PROMPT[0] + 1) % 256, *PROMPT[1:]]
    with EngineProcess(tmp_path, model, options(daemon)) as first:
        cold = first.generate([{"tokens": PROMPT}])[0]
        own = first.generate([{"tokens": PROMPT}])[0]
        kept = first.blocks(PROMPT)
        stored = first.counts()
        assert first.free_blocks()[0] == first.free_blocks()[1], "blocks are still held"
    assert (cold["cached"], own["cached"]) == (0, HIT)
    assert stored["save_stored_write_behind"] == HIT // CHUNK_TOKENS, stored
    with EngineProcess(tmp_path, model, options(daemon)) as second:
        different = second.generate([{"tokens": other}])[0]
        restored = second.generate([{"tokens": PROMPT}])[0]
        counts = second.counts()
        came_back = second.blocks(PROMPT)
    assert different["cached"] == 0, "another first token must miss"
    assert restored["cached"] == HIT
    assert counts["load_tokens"] == HIT, counts
    assert counts["loaded_chunks"] == HIT // CHUNK_TOKENS, counts
    assert restored["tokens"] == own["tokens"] == cold["tokens"]
    assert restored["logprobs"] == own["logprobs"], "not bitwise what the engine's own prefix hit gives"
    assert largest_difference(restored, cold) <= 1e-4
    assert largest_difference(restored, different) > 1e-3, "the oracle does not see a wrong first token"
    assert len(came_back[0]) == len(kept[0]) == HIT // 32
    assert came_back == kept, "restored blocks are not the bytes that were stored"
