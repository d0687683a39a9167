"""The daemon's side of the arena: size, seals, no holes, clean failure when memory is short, nothing left open."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest
from arena_helpers import Run, map_here, memfd_maps, open_fds

from kvstore.arena import Arena, ladder
from kvstore.errors import Closed, Full, Invalid

MIB = 1 << 20

SECCOMP = """
import struct
def madvise_fails(code):
    'From now on MADV_POPULATE_WRITE fails with that errno, by the real kernel: a seccomp filter (x86-64).'
    rows = [(0x20,0,0,0), (0x15,0,3,28), (0x20,0,0,32), (0x15,0,1,23), (0x06,0,0,0x50000|code), (0x06,0,0,0x7fff0000)]
    program = ctypes.create_string_buffer(b''.join(struct.pack('<HBBI', *row) for row in rows))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    head = ctypes.create_string_buffer(struct.pack('<H6xQ', len(rows), ctypes.addressof(program)))
    assert libc.prctl(22, 2, head, 0, 0) == 0, ctypes.get_errno()
"""
x86_only = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the seccomp filter is written for x86-64")


@pytest.mark.parametrize(("asked", "given"), [(1, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB)])
def test_size_is_rounded_up_to_2_mib(asked: int, given: int) -> None:
    with Arena.create(asked) as arena:
        assert arena.size_bytes == given == len(arena.data) == arena.array.size
        assert len(arena.generations) == len(arena.parts_ready) == given // 4096
        assert arena.control_bytes == os.fstat(arena.control_fd).st_size
        assert os.fstat(arena.fd).st_size == given


def test_views_are_one_memory_and_start_unreadable(arena: Arena) -> None:
    assert not arena.array.any()
    assert (arena.generations % 2 == 1).all(), "a generation that was never published must be odd"
    assert not arena.parts_ready.any()
    arena.data[4096] = 7
    assert arena.array[4096] == 7
    assert arena.array.ctypes.data == arena.address
    assert len(arena.arena_id) == 16
    with Arena.create(2 * MIB, "never") as other:
        assert other.arena_id != arena.arena_id


def test_generations_and_parts_do_not_overlap(arena: Arena) -> None:
    arena.generations[:] = 2**64 - 1
    assert not arena.parts_ready.any()
    arena.parts_ready[:] = 5
    assert (arena.generations == 2**64 - 1).all()


def test_there_is_no_hole_in_either_memfd(arena: Arena) -> None:
    for fd in (arena.fd, arena.control_fd):
        assert os.lseek(fd, 0, os.SEEK_HOLE) == os.fstat(fd).st_size
        assert os.fstat(fd).st_blocks * 512 >= os.fstat(fd).st_size


@pytest.mark.parametrize("size", [200 * MIB, 64 * MIB])
def test_progress_rises_to_the_whole_in_the_callers_thread(size: int) -> None:
    seen: list[tuple[int, int]] = []
    threads = set()

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        threads.add(threading.get_ident())

    Arena.create(size, "never", progress).close()
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (size, size)
    assert threads == {threading.get_ident()}


def test_nothing_stays_open(arena: Arena) -> None:
    fds, maps, threads = open_fds(), memfd_maps(), threading.active_count()
    other = Arena.create(2 * MIB)
    assert open_fds() != fds
    other.close()
    other.close()
    assert (open_fds(), memfd_maps(), threading.active_count()) == (fds, maps, threads)


def test_nothing_stays_open_when_progress_raises() -> None:
    fds, maps = open_fds(), memfd_maps()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Arena.create(130 * MIB, "never", stop)
    assert (open_fds(), memfd_maps()) == (fds, maps)


def test_closed_arena_says_so_and_live_views_stay_valid() -> None:
    arena = Arena.create(2 * MIB, "never")
    piece, column, generations = arena.data[4096:8192], arena.array[:10], arena.generations
    arena.data[4096] = 9
    arena.close()
    for read in (lambda: arena.data, lambda: arena.array, lambda: arena.generations, lambda: arena.wake(0)):
        with pytest.raises(Closed):
            read()
    assert piece[0] == 9
    assert not column.any()
    assert generations[0] == 1
    assert memfd_maps() >= 2
    del piece, column, generations
    assert memfd_maps() == 0


@pytest.mark.parametrize("size", [0, -1, 1 << 60])
def test_senseless_sizes_are_invalid(size: int) -> None:
    with pytest.raises(Invalid, match="not possible"):
        Arena.create(size)


def test_more_than_the_machine_has_is_refused_with_the_numbers_before_anything_is_taken() -> None:
    fds = open_fds()
    with pytest.raises(
        Full, match=r"an arena of 8\.0 TiB cannot be had: .* of memory are available; lower arena\.size"
    ):
        Arena.create(8 << 40, "never")
    assert open_fds() == fds


def test_a_file_size_limit_fails_cleanly(run: Run) -> None:
    """The kernel's own refusal (EFBIG) half-way through: one sentence, no signal, nothing open."""
    out = run(
        """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
before = os.listdir('/proc/self/fd')
for kind in ('never', 'auto'):
    try:
        Arena.create(16 << 20, kind)
    except Full as error:
        print(error)
assert os.listdir('/proc/self/fd') == before
with Arena.create(4 << 20) as arena:
    print(arena.size_bytes)
"""
    )
    sentence = "an arena of 16 MiB cannot be had: File too large; lower arena.size"
    assert out.splitlines() == [sentence, sentence, str(4 << 20)]


@x86_only
def test_memory_that_runs_out_while_paging_in_fails_cleanly(run: Run) -> None:
    out = run(
        SECCOMP
        + """
import errno
madvise_fails(errno.ENOMEM)
before = os.listdir('/proc/self/fd')
try:
    Arena.create(256 << 20, 'never')
except Full as error:
    print(error)
assert os.listdir('/proc/self/fd') == before
assert 'memfd:kvstore' not in proc('maps')
"""
    )
    assert out == "an arena of 256 MiB cannot be had: Cannot allocate memory; lower arena.size"


@x86_only
def test_old_kernels_without_populate_are_paged_in_by_touching(run: Run) -> None:
    """Before Linux 5.14 MADV_POPULATE_WRITE is EINVAL."""
    out = run(
        SECCOMP
        + """
import errno
madvise_fails(errno.EINVAL)
seen = []
start = shared_kib()
with Arena.create(70 << 20, 'never', lambda *done: seen.append(done)) as arena:
    print(shared_kib() - start >= 70 << 10, seen[-1] == (70 << 20, 70 << 20), len(seen))
    m = ArenaMapping(os.dup(arena.fd), os.dup(arena.control_fd), arena.size_bytes, arena.control_bytes, b'')
    m.prefault()
    print(m.array.any())
try:
    Arena.create(70 << 20, 'never', lambda done, total: 1 / 0)
except ZeroDivisionError as error:
    kept = error
del kept
assert 'memfd:kvstore-arena' in proc('maps')   # m
del m
assert 'memfd:kvstore' not in proc('maps')
"""
    )
    assert out.splitlines() == ["True True 2", "False"]


def test_the_arena_is_in_no_core_dump(arena: Arena) -> None:
    with map_here(arena) as mapping:
        mapping.data[0] = 1
        flags, inside = [], False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split()[0]:
                inside = "/memfd:kvstore-arena" in line
            elif inside and line.startswith("VmFlags:"):
                flags.append(line.split())
        assert len(flags) == 2
        assert all("dd" in words for words in flags)


def test_page_kind_never_is_4_kib_without_notes(arena: Arena) -> None:
    assert (arena.page_kind, arena.notes) == ("4KiB", [])


def test_auto_names_why_a_rung_was_not_taken() -> None:
    with Arena.create(2 * MIB, "auto") as arena:
        rungs = {"hugetlb": 0, "shmem-huge": 1, "4KiB": 2}
        assert [note.split()[0] for note in arena.notes] == ["hugetlb", "shmem-huge"][: rungs[arena.page_kind]]


def test_always_refuses_4_kib_pages() -> None:
    free = ladder.meminfo()["HugePages_Free"]
    notes: list[str] = []
    if ladder._shmem_advised(notes):
        pytest.skip("this system gives shared memory huge pages")
    fds = open_fds()
    with pytest.raises(
        Full, match=r"no huge pages for an arena of .*hugetlb not taken: it needs \d+ huge .*shmem_enabled"
    ):
        Arena.create((free + 64) * 2 * MIB, "always")
    assert open_fds() == fds


def test_seals_of_both(arena: Arena) -> None:
    size = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) == size
    assert fcntl.fcntl(arena.control_fd, fcntl.F_GET_SEALS) == size | 0x10


def test_a_client_can_neither_resize_nor_write_the_control_page(arena: Arena, run: Run) -> None:
    arena.generations[3] = 42
    out = run(
        """
def refused(call, *args, **words):
    try:
        call(*args, **words)
    except PermissionError:
        return True
    return False
again = [os.open(f'/proc/self/fd/{fd}', os.O_RDWR) for fd in (arena_fd, control_fd)]
for fd in (arena_fd, control_fd, *again):
    size = os.fstat(fd).st_size
    print(refused(os.ftruncate, fd, size - 4096), refused(os.ftruncate, fd, size + 4096), refused(os.ftruncate, fd, 0))
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
for fd in (control_fd, again[1]):
    readable = mmap.mmap(fd, control_bytes, prot=mmap.PROT_READ)
    import numpy
    address = numpy.frombuffer(readable, numpy.uint8).ctypes.data
    print(
        refused(mmap.mmap, fd, control_bytes),
        refused(os.pwrite, fd, b'x', 0),
        libc.mprotect(address, 4096, 3) == -1,
        libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(4096)) == -1,
    )
""",
        arena,
    )
    assert out.splitlines() == ["True True True"] * 4 + ["True True True True"] * 2
    assert arena.generations[3] == 42
    arena.generations[3] = 44  # the daemon's own mapping goes on
    assert arena.generations[3] == 44


def test_wide_tables_for_a_big_arena_are_exact() -> None:
    """control_size at sizes that cannot be created here."""
    from kvstore.arena.control import control_size

    assert control_size(1 << 40) == (1 << 40) // 4096 * 12
    assert control_size(2 << 20) == 8192
