"""Shared by the arena's tests: the head of client scripts, and what a process holds open."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from kvstore.arena import Arena, ArenaMapping

MAP = """
import os, sys, time, mmap, ctypes, signal, threading
from kvstore.arena import Arena, ArenaMapping, FAILED
from kvstore.errors import *
arena_fd, control_fd, arena_bytes, control_bytes = map(int, sys.argv[1:5])
def proc(name):
    with open('/proc/self/' + name) as lines:
        return lines.read()
def shared_kib():
    return int(proc('status').split('RssShmem:')[1].split()[0])
def connect():
    return ArenaMapping(os.dup(arena_fd), os.dup(control_fd), arena_bytes, control_bytes, bytes(16))
"""
"""Head of every client script: the descriptors came by inheritance, `connect()` maps them."""

Spawn = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., str]


def map_here(arena: Arena) -> ArenaMapping:
    return ArenaMapping(
        os.dup(arena.fd), os.dup(arena.control_fd), arena.size_bytes, arena.control_bytes, arena.arena_id
    )


def open_fds() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def memfd_maps() -> int:
    """How many memfd mappings this process has."""
    return sum("/memfd:kvstore" in line for line in Path("/proc/self/maps").read_text().splitlines())
