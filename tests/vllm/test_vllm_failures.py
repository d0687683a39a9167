"""Whatever happens to the daemon, the engine gives the tokens it would have computed, and holds no block longer.

One engine and one daemon for all of this file; each test has prompts of its own.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import tiny_models
from engine_process import EngineProcess
from vllm_rig import CHUNK_TOKENS, PATIENT_S, Rig

pytestmark = pytest.mark.timeout(120)
HIT = 256


def prompt(seed: int) -> list[int]:
    return tiny_models.prompt_token_ids(270, seed)


def same(left: dict, right: dict) -> None:
    assert left["finish"] == right["finish"] == "length"
    assert left["tokens"] == right["tokens"]


def test_the_daemon_restarted_and_the_kv_comes_from_ssd(rig: Rig) -> None:
    cold = rig.stored(prompt(1))
    assert rig.daemon.stop() == 0
    rig.daemon.start()
    assert rig.engine.connected()
    before = rig.engine.counts()
    restored = rig.run(prompt(1))
    same(restored, cold)
    counts = rig.counted(before)
    assert restored["cached"] == HIT, counts
    assert counts["loaded_chunks"] == HIT // CHUNK_TOKENS
    rig.nothing_held()


def test_no_daemon_is_a_miss_and_a_new_one_is_found(rig: Rig) -> None:
    cold = rig.stored(prompt(2))
    rig.daemon.kill()
    missed = rig.run(prompt(2))
    same(missed, cold)
    assert missed["cached"] == 0
    rig.nothing_held()
    rig.engine.reset()
    rig.daemon.start()
    assert rig.engine.connected()
    rig.stored(prompt(3))
    assert rig.run(prompt(3))["cached"] == HIT


def test_a_frozen_daemon_costs_one_deadline_and_no_token(rig: Rig) -> None:
    cold = rig.stored(prompt(4))
    os.kill(rig.daemon.pid, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        missed = rig.run(prompt(4))
        seconds = time.monotonic() - started_s
    finally:
        os.kill(rig.daemon.pid, signal.SIGCONT)
    same(missed, cold)
    assert missed["cached"] == 0
    assert seconds < cold["seconds"] + 2
    rig.nothing_held()
    rig.engine.reset()
    deadline_s = time.monotonic() + 10
    while rig.run(prompt(4))["cached"] != HIT:
        assert time.monotonic() < deadline_s, "the thawed daemon is not used again"
        rig.engine.reset()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_the_daemon_fails_between_the_look_up_and_the_load(rig: Rig, number: signal.Signals) -> None:
    """The engine has been promised the tokens: it must take the failure, compute, and not ask again for ever."""
    tokens = prompt(100 + number)
    cold = rig.stored(tokens)
    before = rig.engine.counts()
    rig.engine.at_load(rig.daemon.pid, number)
    recomputed = rig.run(tokens)
    if number == signal.SIGSTOP:
        os.kill(rig.daemon.pid, signal.SIGCONT)
    else:
        rig.daemon.start()
    same(recomputed, cold)
    counts = rig.counted(before)
    assert counts["load_requests"] == 1, counts
    assert counts["load_requests_failed"] == 1, counts
    assert "loaded_chunks" not in counts
    rig.nothing_held()
    assert rig.engine.connected()
    rig.engine.reset()


def test_killed_while_it_reads_from_ssd(rig: Rig) -> None:
    """Whether the load ends before the kill or not, nothing wrong is computed."""
    tokens = tiny_models.prompt_token_ids(900, 6)
    cold = rig.stored(tokens)
    assert rig.daemon.stop() == 0
    rig.daemon.start()
    assert rig.engine.connected()
    rig.engine.send("generate", [{"tokens": tokens}])
    time.sleep(0.003)
    rig.daemon.kill()
    same(rig.engine.receive()[0], cold)
    rig.nothing_held()
    rig.daemon.start()
    assert rig.engine.connected()
    rig.engine.reset()


def test_bytes_flipped_on_ssd_are_a_miss(rig: Rig) -> None:
    cold = rig.stored(prompt(7))
    assert rig.daemon.stop() == 0
    assert _flip(rig.daemon.ssd_path) > 0
    rig.daemon.start()
    assert rig.engine.connected()
    before = rig.engine.counts()
    recomputed = rig.run(prompt(7))
    same(recomputed, cold)
    counts = rig.counted(before)
    assert "loaded_chunks" not in counts, counts
    assert recomputed["logprobs"] == cold["logprobs"]
    rig.nothing_held()
    rig.engine.reset()


def test_abort_while_loading_stores_nothing_and_frees_everything(rig: Rig) -> None:
    """An aborted load counts as computed tokens in the engine: saving "them" would store whatever the blocks held."""
    rig.stored(prompt(8))
    before = rig.engine.counts()
    rig.engine.at_load(rig.daemon.pid, signal.SIGSTOP)
    rig.engine.start("doomed", prompt(8))
    rig.engine.steps(2)
    rig.engine.abort("doomed")
    assert rig.engine.drain(), "the engine waits for a report that never comes"
    os.kill(rig.daemon.pid, signal.SIGCONT)
    rig.nothing_held()
    counts = rig.counted(before)
    assert "save_chunks" not in counts, counts
    assert rig.engine.connected()
    rig.engine.reset()


def test_abort_while_running(rig: Rig) -> None:
    rig.engine.start("doomed", prompt(9), 40)
    rig.engine.steps(3)
    rig.engine.abort("doomed")
    assert rig.engine.drain()
    rig.nothing_held()
    rig.engine.reset()
    again = rig.run(prompt(9))
    assert again["cached"] == HIT, "what it had computed was stored"
    same(again, rig.cold(prompt(9)))


def test_policy_fail_ends_the_request_and_nothing_else(rig: Rig, tmp_path: Path) -> None:
    options = {"socket_path": str(rig.daemon.socket_path), "chunk_tokens": CHUNK_TOKENS, "lookup_timeout_s": PATIENT_S}
    cold = rig.stored(prompt(10))
    with EngineProcess(tmp_path, tiny_models.llama().folder(), options, policy="fail") as engine:
        engine.at_load(rig.daemon.pid, signal.SIGSTOP)
        failed = engine.generate([{"tokens": prompt(10)}])[0]
        os.kill(rig.daemon.pid, signal.SIGCONT)
        assert failed["finish"] == "error"
        assert engine.connected()
        free, total = engine.free_blocks()
        assert free == total
        again = engine.generate([{"tokens": prompt(10)}])[0]
        same(again, cold)  # the worker still avoids the daemon, so nothing may be promised
        deadline_s = time.monotonic() + 10
        while again["cached"] != HIT:
            assert time.monotonic() < deadline_s, "the thawed daemon is not used again"
            engine.reset()
            again = engine.generate([{"tokens": prompt(10)}])[0]
            same(again, cold)
    assert rig.engine.connected()


def test_preempted_requests_come_back_from_the_store(rig: Rig, tmp_path: Path) -> None:
    prompts = [tiny_models.prompt_token_ids(90, seed) for seed in (11, 12, 13)]
    cold = [rig.cold(tokens, count=80) for tokens in prompts]
    options = {
        "socket_path": str(rig.daemon.socket_path),
        "chunk_tokens": 32,
        "held_share": 0.5,
        "lookup_timeout_s": PATIENT_S,
    }
    few = {"num_gpu_blocks_override": 13, "max_model_len": 320}
    with EngineProcess(tmp_path, tiny_models.llama().folder(), options, **few) as engine:
        results = engine.generate([{"tokens": tokens, "count": 80} for tokens in prompts])
        counts = engine.counts()
        free, total = engine.free_blocks()
    assert counts["load_tokens"] > 0, "nobody was preempted, or nothing came back"
    for got, expected in zip(results, cold, strict=True):
        same(got, expected)
    assert free == total


def _flip(folder: Path) -> int:
    """Flip a byte in every 16 KiB of every segment file where something is; returns how many."""
    flipped = 0
    for path in folder.rglob("*.kvs"):
        data = bytearray(path.read_bytes())
        for place in range(8192 + 100, len(data), 16384):
            if data[place]:
                data[place] ^= 1
                flipped += 1
        path.write_bytes(data)
    return flipped
