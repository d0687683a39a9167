"""The misbehaving wrappers do misbehave, and say how to play a run again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ssd_rig import SMALL, Rig

from kvstore.errors import Corrupt, KVStoreError, Unavailable
from kvstore.testing.chunks import aligned, filled
from kvstore.testing.wrappers import FaultyBackend, SlowBackend


def outcomes(rig: Rig, seed: int) -> list[str]:
    faulty = FaultyBackend(rig.volume, share=0.5, seed=seed)
    said = []
    for item in rig.items(20):
        said += [type(result).__name__ for result in faulty.write([item], filled([item]))]
        try:
            said.append(str(faulty.read_into(item, aligned(SMALL.slot_bytes))))
        except KVStoreError as error:
            said.append(type(error).__name__)
    assert faulty.failures > 0
    return said


def test_faults_follow_the_printed_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rig = Rig(tmp_path)
    first, second, third = outcomes(rig, 7), outcomes(rig, 7), outcomes(rig, 8)
    assert first == second != third
    assert {"NoneType", "Full", "Unavailable", "True", "Corrupt"} <= set(first)
    assert "FaultyBackend(seed=7" in capsys.readouterr().err
    rig.volume.close()


def test_no_faults_at_zero_and_only_faults_at_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    (item,) = rig.store(1)
    calm = FaultyBackend(rig.volume, share=0.0)
    assert calm.read_into(item, aligned(SMALL.slot_bytes))
    assert calm.path == rig.folder
    wild = FaultyBackend(rig.volume, share=1.0)
    with pytest.raises((Unavailable, Corrupt)):
        wild.read_into(item, aligned(SMALL.slot_bytes))
    rig.volume.close()


def test_slow_is_slow_and_right(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    (item,) = rig.store(1)
    slow = SlowBackend(rig.volume, 0.05, seed=1)
    start_s = time.monotonic()
    assert slow.read_into(item, aligned(SMALL.slot_bytes))
    assert time.monotonic() - start_s >= 0.025
    rig.volume.close()
