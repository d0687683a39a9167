"""The client's side of the arena: it refuses what would crash it later, reads live memory, survives close."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from arena_helpers import Run, Spawn, map_here, memfd_maps, open_fds

from kvstore.arena import Arena, ArenaMapping
from kvstore.errors import Closed, Invalid

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memfd(size: int, seals: int) -> int:
    fd = os.memfd_create("kvstore-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_both_sides_see_each_others_writes(arena: Arena, run: Run) -> None:
    arena.data[:5] = b"hello"
    arena.generations[9] = 1 << 40
    arena.parts_ready[9] = 3
    out = run(
        """
m = connect()
print(bytes(m.data[:5]).decode(), int(m.generations[9]), m.generation(9), int(m.parts_ready[9]))
m.array[-4:] = 8
""",
        arena,
    )
    assert out == f"hello {1 << 40} {1 << 40} 3"
    assert bytes(arena.data[-4:]) == b"\x08" * 4


def test_the_control_page_is_read_only_in_python_and_in_the_kernel(
    arena: Arena, mapping: ArenaMapping, spawn: Spawn
) -> None:
    for table in (mapping.generations, mapping.parts_ready):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 2
        with pytest.raises(ValueError, match="WRITEABLE"):
            table.setflags(write=True)
    child = spawn("m = connect(); ctypes.memset(m.generations.ctypes.data, 0, 8); print('written')", arena)
    out, _ = child.communicate(timeout=30)
    assert (child.returncode, out) == (-signal.SIGSEGV, "")
    assert arena.generations[0] == 1


def test_wrong_descriptors_are_refused_and_closed(arena: Arena, tmp_path: Path) -> None:
    """Each would be a SIGBUS, a garbled control page or a forgeable one later on."""
    size, control = arena.size_bytes, arena.control_bytes
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(size))
    good, good_control = (lambda: os.dup(arena.fd)), (lambda: os.dup(arena.control_fd))
    cases = [
        (good, good_control, size * 2, control, "has 4194304 bytes, not the 8388608"),
        (good, good_control, size - 4096, control, "has 4194304 bytes"),
        (good, good_control, size, control + 4096, "control page has"),
        (good, good_control, 0, control, "arena has"),
        (good, good_control, -5, control, "arena has"),
        (good_control, good, control, size, "not sealed"),
        (good, good, size, size, "not sealed"),
        (lambda: memfd(size, 0), good_control, size, control, "not sealed"),
        (lambda: memfd(size, fcntl.F_SEAL_GROW), good_control, size, control, "not sealed"),
        (lambda: memfd(size // 2, SIZE_SEALS), good_control, size, control, "arena has 2097152 bytes"),
        (lambda: memfd(size * 2, SIZE_SEALS), good_control, size * 2, control, "does not fit"),
        (lambda: memfd(6000, SIZE_SEALS), good_control, 6000, control, "does not fit"),
        (good, lambda: memfd(control, SIZE_SEALS), size, control, "control page is not sealed"),
        (good, lambda: memfd(control // 2, SIZE_SEALS | 0x10), size, control, "control page has"),
        (lambda: os.open(plain, os.O_RDWR), good_control, size, control, "no sealed shared memory"),
        (lambda: os.open("/dev/zero", os.O_RDWR), good_control, size, control, "no sealed shared memory"),
        (good, lambda: os.open("/dev/null", os.O_RDWR), size, control, "no sealed shared memory"),
        (good, lambda: 98765, size, control, "no sealed shared memory: Bad file descriptor"),
    ]
    fds, maps = open_fds(), memfd_maps()
    for make, make_control, arena_bytes, control_bytes, why in cases:
        with pytest.raises(Invalid, match=why):
            ArenaMapping(make(), make_control(), arena_bytes, control_bytes, bytes(16))
        assert (open_fds(), memfd_maps()) == (fds, maps), why


def test_open_and_close_leave_nothing_behind(arena: Arena) -> None:
    fds, maps = open_fds(), memfd_maps()
    for _ in range(5):
        mapping = map_here(arena)
        assert mapping.generations[0] == 1
        mapping.prefault()
        mapping.close()
        mapping.close()
    assert (open_fds(), memfd_maps()) == (fds, maps)


def test_close_with_live_views_keeps_their_memory_until_they_die(arena: Arena) -> None:
    fds, maps = open_fds(), memfd_maps()
    mapping = map_here(arena)
    slice_of_data = mapping.data[100:200].toreadonly()
    derived = mapping.array[4096:8192].view(np.uint32)
    parts = mapping.parts_ready[5:]
    mapping.close()
    arena.data[100] = 5
    arena.array[4096:8192] = 1
    arena.parts_ready[5] = 6
    assert slice_of_data[0] == 5
    assert (derived == 0x01010101).all()
    assert parts[0] == 6
    assert memfd_maps() == maps + 2
    del slice_of_data, derived
    assert memfd_maps() == maps + 1
    del parts
    assert (open_fds(), memfd_maps()) == (fds, maps)


def test_after_close_everything_says_closed(mapping: ArenaMapping) -> None:
    mapping.close()
    assert mapping.closed
    assert mapping.address == 0
    for use in (
        lambda: mapping.data,
        lambda: mapping.array,
        lambda: mapping.generations,
        lambda: mapping.parts_ready,
        lambda: mapping.generation(0),
        lambda: mapping.wait_parts(0, 1, 1, 0),
        mapping.prefault,
    ):
        with pytest.raises(Closed):
            use()


def test_prefault_maps_every_page(arena: Arena, run: Run) -> None:
    out = run(
        """
m = connect()
before = shared_kib()
m.prefault()
print(shared_kib() - before >= arena_bytes >> 10, before < arena_bytes >> 10, m.array.any())
""",
        arena,
    )
    assert out == "True True False"


def test_closing_while_another_thread_prefaults_or_waits_is_harmless() -> None:
    with Arena.create(256 << 20, "never") as arena:
        arena.generations[0] = 2
        maps = memfd_maps()
        for pause_s in (0.0, 0.001, 0.004):
            mapping = map_here(arena)
            answers: list[int] = []

            def wait(mapping: ArenaMapping = mapping, answers: list[int] = answers) -> None:
                try:
                    answers.append(mapping.wait_parts(0, 2, 1, time.monotonic() + 20))
                except Closed:
                    answers.append(-1)

            def prefault(mapping: ArenaMapping = mapping) -> None:
                try:
                    mapping.prefault()
                except Closed:
                    return

            threads = [threading.Thread(target=prefault), threading.Thread(target=wait)]
            for thread in threads:
                thread.start()
            time.sleep(pause_s)
            start = time.monotonic()
            mapping.close()
            for thread in threads:
                thread.join(10)
            assert not any(thread.is_alive() for thread in threads)
            assert time.monotonic() - start < 5
            assert answers in ([0], [-1])
        assert memfd_maps() == maps


def test_a_forked_child_of_a_client_does_no_harm(arena: Arena, run: Run) -> None:
    """Engines fork helpers: the child has the same memory, may close it, and its parent notices nothing."""
    arena.generations[1] = 2
    out = run(
        """
m = connect()
view = m.data[:4096]
pid = os.fork()
if pid == 0:
    assert m.wait_parts(1, 2, 1, time.monotonic() + 0.05) == 0
    m.data[0] = 77
    m.close()
    os._exit(view[0])
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), view[0], m.data[0])
m.data[1] = 78
m.close()
print(view[1])
""",
        arena,
    )
    assert out.split() == ["77", "77", "77", "78"]
    assert bytes(arena.data[:2]) == b"\x4d\x4e"


def test_a_killed_daemon_leaves_its_clients_readable_memory(spawn: Spawn) -> None:
    """kill -9 of the process that made the arena: no SIGBUS, the bytes stay, waiting ends at the deadline."""
    daemon = spawn(
        """
import socket
server = socket.socket(socket.AF_UNIX); server.bind('\\0kvstore-test-%d' % os.getppid()); server.listen()
arena = Arena.create(4 << 20)
arena.data[-1] = 123
arena.generations[0] = 2
print('ready', flush=True)
peer, _ = server.accept()
socket.send_fds(peer, [b'%d %d' % (arena.size_bytes, arena.control_bytes)], [arena.fd, arena.control_fd])
signal.pause()
"""
    )
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == "ready\n"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0kvstore-test-{os.getpid()}")
        text, fds, _, _ = socket.recv_fds(client, 100, 2)
    size, control = map(int, text.split())
    with ArenaMapping(*fds, size, control, bytes(16)) as mapping:
        daemon.kill()
        daemon.wait(10)
        assert mapping.data[-1] == 123
        mapping.prefault()
        mapping.array[:] = 1
        start = time.monotonic()
        assert mapping.wait_parts(0, 2, 1, start + 0.1) == 0
        assert 0.1 <= time.monotonic() - start < 2
