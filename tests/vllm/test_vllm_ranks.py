"""Two ranks: each stores and loads its own heads, and a chunk is there only when both have stored it. Then asynchronous
scheduling, where a step is planned before the one before it has been computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
from engine_process import EngineProcess

from kvstore.testing.daemon import DaemonProcess

pytestmark = pytest.mark.timeout(300)
PROMPT = tiny_models.prompt_token_ids(270, 77)
HIT = 256


def options(daemon: DaemonProcess) -> dict[str, object]:
    return {"socket_path": str(daemon.socket_path), "chunk_tokens": 64, "lookup_timeout_s": 1.0}


def test_two_ranks(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    daemon = make_daemon()
    model = tiny_models.llama().folder()
    with EngineProcess(tmp_path, model, options(daemon), ranks=2) as first:
        cold = first.generate([{"tokens": PROMPT}])[0]
        own = first.generate([{"tokens": PROMPT}])[0]
        kept = first.blocks(PROMPT)
        counts = first.counts()
        free, total = first.free_blocks()
        assert free == total
    # One rank's commit completes a chunk; the other's was the first half of it.
    assert counts["save_partial"] == counts["save_stored_write_behind"] == HIT // 64, counts
    with EngineProcess(tmp_path, model, options(daemon), ranks=2) as second:
        restored = second.generate([{"tokens": PROMPT}])[0]
        came_back = second.blocks(PROMPT)
        counts = second.counts()
    assert (cold["cached"], own["cached"], restored["cached"]) == (0, HIT, HIT)
    assert counts["loaded_chunks"] == 2 * HIT // 64
    assert restored["tokens"] == cold["tokens"]
    assert restored["logprobs"] == own["logprobs"]
    assert len(came_back) == 2
    assert came_back == kept
    assert kept[0] != kept[1], "both ranks hold the same bytes: nothing is proven"
    with EngineProcess(tmp_path, model, options(daemon)) as alone:
        assert alone.generate([{"tokens": PROMPT}])[0]["cached"] == 0, "one rank's engine took two ranks' KV"


def test_asynchronous_scheduling(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    daemon = make_daemon()
    model = tiny_models.llama().folder()
    prompts = [tiny_models.prompt_token_ids(200, seed) for seed in (80, 81, 82)]
    with EngineProcess(tmp_path, model, options(daemon)) as plain:
        cold = plain.generate(
            [{"tokens": tokens, "count": 70, "params": {"kvstore": {"off": True}}} for tokens in prompts]
        )
    with EngineProcess(tmp_path, model, options(daemon), async_scheduling=True) as first:
        saved = first.generate([{"tokens": tokens, "count": 70} for tokens in prompts])
        free, total = first.free_blocks()
        assert free == total
        assert "AsyncScheduler" in first.scheduler()
    with EngineProcess(tmp_path, model, options(daemon), async_scheduling=True) as second:
        turns = [tokens + result["tokens"] + [9] for tokens, result in zip(prompts, cold, strict=True)]
        restored = second.generate([{"tokens": tokens, "count": 20} for tokens in turns])
        assert second.reset()
        off = {"kvstore": {"off": True}}
        fresh = second.generate([{"tokens": tokens, "count": 20, "params": off} for tokens in turns])
    assert [result["tokens"] for result in saved] == [result["tokens"] for result in cold]
    assert [result["cached"] for result in restored] == [256] * 3, "prompt and generated tokens"
    assert [result["cached"] for result in fresh] == [0] * 3
    assert [result["tokens"] for result in restored] == [result["tokens"] for result in fresh]
