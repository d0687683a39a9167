"""Real client processes for the arena's tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from arena_helpers import MAP, Run, Spawn, map_here

from kvstore.arena import Arena, ArenaMapping


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(4 << 20, "never") as created:
        yield created


@pytest.fixture
def mapping(arena: Arena) -> Iterator[ArenaMapping]:
    with map_here(arena) as mapped:
        yield mapped


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """spawn(script, arena=None) -> a running Python process with pipes; killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, arena: Arena | None = None) -> subprocess.Popen[str]:
        numbers = [arena.fd, arena.control_fd, arena.size_bytes, arena.control_bytes] if arena else [0, 0, 0, 0]
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", MAP + script, *map(str, numbers)],
            pass_fds=numbers[:2] if arena else (),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run(spawn: Spawn) -> Run:
    """run(script, arena=None) -> what it printed; fails the test where it ended badly."""

    def to_the_end(script: str, arena: Arena | None = None) -> str:
        process = spawn(script, arena)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        return out.strip()

    return to_the_end
