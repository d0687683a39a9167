"""The tools that benchmarks and the demonstration rest on: a broken one would report anything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.harness import Report, interleave, ratio, scratch
from bench.memory import Rotation, copy_s, private_memory
from bench.trace import TOKENS_PER_BLOCK, Payload, block_key, load_requests
from kvstore.units import MiB


def test_report_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("demo")
    report.add("fast", 1.04, "ratio", at_most=1.1)
    report.add("slow", 0.5, "ratio", at_least=0.9)
    report.add("told", 7, "chunks")
    assert report.finish(as_json=True) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "bench": "demo",
        "ok": False,
        "figures": {
            "fast": {"value": 1.04, "unit": "ratio", "target": "<= 1.1", "ok": True},
            "slow": {"value": 0.5, "unit": "ratio", "target": ">= 0.9", "ok": False},
            "told": {"value": 7, "unit": "chunks", "target": None, "ok": True},
        },
    }


def test_rounds_alternate_and_warm_up_is_dropped() -> None:
    order: list[str] = []

    def step(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    seconds = interleave(2, {"a": lambda i: step("a", i), "b": lambda i: step("b", 10 + i)}, warm_up=1)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [1, 2], "b": [11, 12]}
    assert ratio(seconds["b"], seconds["a"]) == (11 / 1 + 12 / 2) / 2


def test_every_wrong_byte_is_found() -> None:
    payload = Payload(4096)
    chunk, other = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    payload.fill(block_key(1), chunk)
    assert payload.wrong_bytes(block_key(1), chunk) == 0
    payload.fill(block_key(2), other)
    assert payload.wrong_bytes(block_key(1), other) > 3000, "another chunk's bytes pass"
    assert payload.wrong_bytes(block_key(1), np.roll(chunk, 8)) > 3000, "shifted bytes pass"
    chunk[4095] ^= 1
    assert payload.wrong_bytes(block_key(1), chunk) == 1


def test_trace_is_the_recorded_one() -> None:
    requests = load_requests(200)
    assert [request.input_tokens for request in requests[:3]] == [6758, 7322, 7236]
    assert requests[0].keys[0] == requests[1].keys[0] == block_key(0), "the shared first block has one key"
    assert all(len(r.keys) == -(-r.input_tokens // TOKENS_PER_BLOCK) for r in requests)
    assert len({key for request in requests for key in request.keys}) == 5215


def test_rotation_hands_out_all_memory_in_turns() -> None:
    memory = Rotation.over(private_memory(4 * MiB), MiB)
    pieces = memory.next(3)
    assert [piece.nbytes for piece in pieces] == [MiB] * 3
    assert memory.next(2)[0] is memory.pieces[0], "too few are left: it starts again"
    pieces[1][:] = 9
    assert copy_s([memory.pieces[3]], [pieces[1]]) > 0
    assert (memory.pieces[3] == 9).all()


def test_scratch_folder_is_removed(tmp_path: Path) -> None:
    with scratch(tmp_path / "parent") as folder:
        (folder / "file").write_text("x")
    assert list((tmp_path / "parent").iterdir()) == []
