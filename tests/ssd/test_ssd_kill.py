"""kill -9 of a writing process, again and again: each chunk is whole or absent, and nothing acknowledged is lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ssd_child import item_of
from ssd_rig import Rig

from kvstore.errors import Corrupt
from kvstore.testing.chunks import payload_of

CHILD = Path(__file__).with_name("ssd_child.py")


def run_and_kill(folder: Path, seed: int, after_s: float) -> list[list[str]]:
    """What the child said before it died."""
    child = subprocess.Popen(
        [sys.executable, str(CHILD), "write", str(folder), str(seed)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "open\n"
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().splitlines()
    child.wait()
    return [line.split() for line in lines if len(line.split()) == 3]


def check(folder: Path, said: list[list[str]], cycle: str) -> int:
    """Compare the volume with what the child said; returns how many chunks were verified."""
    last: dict[int, tuple[str, int]] = {}
    acknowledged: dict[int, tuple[str, int]] = {}
    removed: set[int] = set()
    for verb, sequence, place in said:
        last[int(place)] = (verb, int(sequence))
        if verb not in ("try", "drop"):
            acknowledged[int(place)] = (verb, int(sequence))
        if verb == "gone":
            removed.add(int(sequence))
    rig = Rig(folder, size_bytes=8 << 20)
    verified = 0
    try:
        loaded = dict(zip(rig.loaded.place.tolist(), rig.loaded.sequence.tolist(), strict=True))
        for place, sequence in loaded.items():
            item = item_of(sequence, place, sequence)
            assert sequence not in removed, f"{cycle}: a removed chunk is back"
            try:
                got = rig.read(item)
            except Corrupt:
                got = None
            assert got in (None, payload_of(item)), f"{cycle}: wrong bytes"
            verified += got is not None
        for place, (verb, sequence) in acknowledged.items():
            if verb == "done" and last[place] == ("done", sequence):
                item = item_of(sequence, place, sequence)
                assert loaded.get(place) == sequence, f"{cycle}: an acknowledged durable chunk is lost"
                assert rig.read(item) == payload_of(item), f"{cycle}: an acknowledged durable chunk is damaged"
    finally:
        rig.volume.close()
    return verified


def cycles(folder: Path, count: int, seed: int) -> None:
    print(f"kill cycles: seed={seed}")
    draw = random.Random(seed)
    verified = 0
    for number in range(count):
        said = run_and_kill(folder, draw.getrandbits(30), draw.uniform(0.02, 0.4))
        lose_index = number % 3 == 2
        if lose_index:
            (folder / "index").rename(folder / f"index.lost{number}")
        verified += check(folder, said, f"seed {seed}, cycle {number}")
    assert verified > count, "the cycles must have stored something, or they prove nothing"


def test_a_few_kill_cycles(tmp_path: Path) -> None:
    cycles(tmp_path, 6, random.SystemRandom().getrandbits(30))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_kill_cycles(tmp_path: Path) -> None:
    cycles(tmp_path, 200, random.SystemRandom().getrandbits(30))
