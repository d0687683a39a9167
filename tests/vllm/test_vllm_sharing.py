"""Who may share KV: requests with one prefix, engines of one identity, and nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engine_process import EngineFailed, EngineProcess
from vllm_rig import CHUNK_TOKENS, PATIENT_S, Rig

pytestmark = pytest.mark.timeout(180)
HIT = 256


def prompt(seed: int, length: int = 270) -> list[int]:
    return tiny_models.prompt_token_ids(length, 1000 + seed)


def options(rig: Rig, **more: Any) -> dict[str, Any]:
    return {
        "socket_path": str(rig.daemon.socket_path),
        "chunk_tokens": CHUNK_TOKENS,
        "lookup_timeout_s": PATIENT_S,
    } | more


def other_engine(rig: Rig, folder: Path, model: Path | None = None, **engine: Any) -> EngineProcess:
    return EngineProcess(folder, model or tiny_models.llama().folder(), options(rig), **engine)


def test_two_requests_of_one_step_share_a_prefix(rig: Rig) -> None:
    left, right = [*prompt(1), 1, 2, 3], [*prompt(1), 4, 5, 6]
    cold = [rig.cold(left), rig.cold(right)]
    rig.stored(prompt(1))
    before = rig.engine.counts()
    both = rig.engine.generate([{"tokens": left}, {"tokens": right}])
    counts = rig.counted(before)
    assert [result["cached"] for result in both] == [HIT, HIT]
    assert [result["tokens"] for result in both] == [result["tokens"] for result in cold]
    assert counts["load_tokens"] == 2 * HIT
    rig.nothing_held()
    rig.engine.reset()


def test_a_hit_of_the_engine_that_ends_inside_a_chunk_loads_only_the_rest(rig: Rig) -> None:
    """96 tokens are the engine's own: a chunk and a half. Blocks of its own may be shared and are not written."""
    cold = rig.cold(prompt(2))
    rig.stored(prompt(2))
    rig.run(prompt(2, 96 + 5), count=1)
    assert rig.engine.reset()
    rig.run(prompt(2, 96 + 5), count=1, params={"kvstore": {"off": True}})  # 3 blocks in the engine's own cache
    before = rig.engine.counts()
    mine = rig.engine.blocks(prompt(2, 96 + 5))
    restored = rig.run(prompt(2))
    counts = rig.counted(before)
    assert len(mine[0]) == 3
    assert restored["cached"] == HIT
    assert counts["load_tokens"] == HIT - 96, counts
    assert counts["loaded_blocks"] == (HIT - 96) // 32
    assert restored["tokens"] == cold["tokens"]
    assert rig.engine.blocks(prompt(2))[0][:3] == mine[0]
    rig.nothing_held()
    rig.engine.reset()


def test_a_whole_prompt_is_loaded_and_its_last_token_computed(rig: Rig) -> None:
    cold = rig.cold(prompt(3, 128))
    rig.stored(prompt(3, 128))
    restored = rig.run(prompt(3, 128))
    assert restored["tokens"] == cold["tokens"]
    assert restored["cached"] >= 127
    rig.engine.reset()


def test_generated_tokens_are_stored_too(rig: Rig) -> None:
    """The prompt of a conversation's next turn begins with the answer to the one before."""
    first = rig.stored(prompt(4, 100), count=60)
    turn = prompt(4, 100) + first["tokens"] + [7, 8, 9]
    before = rig.engine.counts()
    second = rig.run(turn)
    assert second["cached"] == 128, rig.counted(before)
    assert second["tokens"] == rig.cold(turn)["tokens"]


def test_salts_are_kept_apart(rig: Rig) -> None:
    rig.stored(prompt(5), salt="a tenant")
    assert rig.run(prompt(5), salt="another")["cached"] == 0
    assert rig.run(prompt(5))["cached"] == 0
    rig.engine.reset()
    assert rig.run(prompt(5), salt="a tenant")["cached"] == HIT
    rig.engine.reset()


def test_a_request_may_opt_out(rig: Rig) -> None:
    before = rig.engine.counts()
    rig.cold(prompt(6))
    counts = rig.counted(before)
    assert counts == {"requests_not_served_off": 1}
    assert rig.run(prompt(6))["cached"] == 0
    rig.engine.reset()
    bad = rig.run(prompt(7), params={"kvstore": {"of": True}})
    assert bad["finish"] == "length"
    assert rig.counted(before)["requests_not_served_off"] == 2
    rig.engine.reset()


def test_a_new_epoch_finds_nothing_of_before(rig: Rig, tmp_path: Path) -> None:
    """After the weights were changed in place: `reset_prefix_cache(reset_connector=True)`."""
    rig.stored(prompt(8))
    with other_engine(rig, tmp_path) as engine:
        assert engine.generate([{"tokens": prompt(8)}])[0]["cached"] == HIT
        assert engine.reset(True)
        assert engine.generate([{"tokens": prompt(8)}])[0]["cached"] == 0
        assert engine.reset()
        assert engine.generate([{"tokens": prompt(8)}])[0]["cached"] == HIT, "the new epoch's own KV"


def test_chunked_prefill_on_a_second_engine(rig: Rig, tmp_path: Path) -> None:
    """Saved while the prompt is being computed in pieces of 128; two engines share one daemon, both ways."""
    tokens = prompt(9, 600)
    cold = rig.cold(tokens)
    with other_engine(rig, tmp_path, max_num_batched_tokens=128, max_num_seqs=4) as engine:
        first = engine.generate([{"tokens": tokens}])[0]
        assert (first["cached"], first["tokens"]) == (0, cold["tokens"])
        assert engine.counts()["save_chunks"] == 600 // CHUNK_TOKENS
        restored = rig.run(tokens)
        assert (restored["cached"], restored["tokens"]) == (576, cold["tokens"])
        rig.stored(prompt(10))
        assert engine.generate([{"tokens": prompt(10)}])[0]["cached"] == HIT
    rig.engine.reset()


@pytest.mark.parametrize("change", ["one byte of the weights", "dtype", "another block size", "rope"])
def test_other_engines_miss(rig: Rig, tmp_path: Path, change: str) -> None:
    """Equal shapes, equal tokens, equal sizes: everything that changes KV must keep engines apart."""
    model, engine = tiny_models.llama().folder(), {}
    if change == "one byte of the weights":
        model = tiny_models.change_one_byte(model, tmp_path / "model")
    elif change == "dtype":
        engine = {"dtype": "bfloat16"}
    elif change == "another block size":
        engine = {"block_size": 64}
    else:
        engine = {"hf_overrides": {"rope_theta": 5000.0}}
    rig.stored(prompt(11))
    assert rig.run(prompt(11))["cached"] == HIT
    rig.engine.reset()
    with other_engine(rig, tmp_path, model, **engine) as other:
        assert other.generate([{"tokens": prompt(11)}])[0]["cached"] == 0
        assert other.reset()
        assert other.generate([{"tokens": prompt(11)}])[0]["cached"] == HIT, "its own KV"


def test_what_is_not_supported_is_refused_at_start(rig: Rig, tmp_path: Path) -> None:
    """The engine ends with our sentence; all the others are tested in tests/connectors/test_vllm_limits.py."""
    refused = other_engine(rig, tmp_path, tiny_models.hybrid().folder())
    with pytest.raises(EngineFailed, match=r"several KV cache groups yet \(SlidingWindowSpec, FullAttentionSpec\)"):
        refused.__enter__()
