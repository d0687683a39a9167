"""Faults 1 and 2: SIGKILL at random times under real load, with an oracle outside the daemon.

What was acknowledged as on SSD is there after every kill, and no byte that is served is wrong. The long run
(`--slow`, or `python -m bench.killcycles --cycles 500`) is the same code.
"""

from __future__ import annotations

import random
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from bench.harness import Report
from bench.killcycles import run

resource_tracker.ensure_running()  # it keeps a pipe for the life of this process: not a leak of a test


@pytest.mark.timeout(120)
def test_a_few_kills_lose_nothing_durable_and_serve_nothing_wrong(tmp_path: Path) -> None:
    total = run(tmp_path, 4, random.Random(20261129), Report("killcycles", quiet=True))
    assert total["checked"] > 0
    assert (total["wrong"], total["lost"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_kills_lose_nothing_durable_and_serve_nothing_wrong(tmp_path: Path) -> None:
    total = run(tmp_path, 200, random.Random(), Report("killcycles"))
    assert total["checked"] > 0
    assert (total["wrong"], total["lost"]) == (0, 0)
