"""The unit file as systemd judges it, offline."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "systemd" / "kvstore.service"


@pytest.mark.parametrize("words", [["verify"], ["security", "--offline=true", "--threshold=20"]])
def test_systemd_accepts_the_unit_and_finds_it_hardened(words: list[str]) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run([analyze, *words, str(UNIT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_unit_has_what_the_daemon_relies_on() -> None:
    lines = UNIT.read_text().splitlines()
    wanted = ["Type=notify", "Nice=-5", "LimitMEMLOCK=infinity", "LimitCORE=0", "RuntimeDirectory=kvstore"]
    wanted += ["StateDirectory=kvstore", "RestartPreventExitStatus=2 6"]
    assert [line for line in wanted if line not in lines] == []
