"""The upper rungs of the ladder, on the real kernel. They change system settings and put them back: root."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from arena_helpers import Run, map_here, open_fds

from kvstore.arena import Arena
from kvstore.arena.ladder import meminfo
from kvstore.errors import Full

MIB = 1 << 20
POOL = Path("/proc/sys/vm/nr_hugepages")
SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

pytestmark = [
    pytest.mark.root("changes huge-page settings of the system"),
    pytest.mark.skipif(not os.access(POOL, os.W_OK), reason="the huge-page pool cannot be set here"),
]


def unused_pages() -> int:
    """Free in the pool and promised to nobody."""
    values = meminfo()
    return values["HugePages_Free"] - values["HugePages_Rsvd"]


@contextmanager
def setting(path: Path, value: str) -> Iterator[None]:
    """Set, and put back what was there; one test process at a time."""
    with open(Path(tempfile.gettempdir(), "kvstore-test-huge-pages.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = path.read_text().strip()
        if "[" in before:
            before = before[before.find("[") + 1 : before.find("]")]
        try:
            path.write_text(value)
        except OSError as error:
            pytest.skip(f"{path} cannot be set here: {error.strerror}")
        try:
            yield
        finally:
            path.write_text(before)


@pytest.fixture
def free_pages() -> Iterator[int]:
    """At least 8 free pages in the pool, and how many; a pool that is there already is left as it is."""
    free = unused_pages()
    if free >= 8:
        yield free
        return
    with setting(POOL, str(meminfo()["HugePages_Total"] - free + 8)):
        if unused_pages() != 8:
            pytest.skip("this system did not find 8 huge pages")
        yield 8


def test_the_top_rung_is_a_huge_page_memfd(free_pages: int, run: Run) -> None:
    seen: list[tuple[int, int]] = []
    with Arena.create(12 * MIB, "always", lambda *done: seen.append(done)) as arena:
        assert (arena.page_kind, arena.notes) == ("hugetlb", [])
        assert seen[-1] == (12 * MIB, 12 * MIB)
        assert unused_pages() == free_pages - 6
        assert os.fstat(arena.fd).st_blksize == 2 * MIB
        arena.generations[0] = 2
        out = run("m = connect(); m.prefault(); m.data[-1] = 9; print(m.wait_parts(0, 2, 0, 0), len(m.data))", arena)
        assert out == f"0 {12 * MIB}"
        assert arena.data[-1] == 9
        with map_here(arena) as mapping:
            assert mapping.array[-1] == 9
    assert unused_pages() == free_pages


def test_a_pool_that_is_too_small_falls_back_and_gets_its_pages_back(free_pages: int) -> None:
    """A fallocate that ran out leaves the pool at 0 until the descriptor is closed: the next rung starts after that."""
    if free_pages > 512:
        pytest.skip("this system's huge-page pool is too big to be exhausted by a test")
    fds = open_fds()
    with Arena.create((free_pages + 2) * 2 * MIB, "auto") as arena:
        assert arena.page_kind != "hugetlb"
        assert arena.notes[0] == (
            f"hugetlb not taken: it needs {free_pages + 2} huge pages of 2 MiB and {free_pages} are free"
            " (sysctl vm.nr_hugepages)"
        )
        assert unused_pages() == free_pages
    assert open_fds() == fds


def test_shared_memory_gets_huge_pages_where_advice_is_heard() -> None:
    if not SHMEM.exists():
        pytest.skip("this kernel has no huge pages for shared memory")
    free = unused_pages()
    size = (free + 16) * 2 * MIB
    if size > 1 << 30:
        pytest.skip("a huge-page pool comes first here")
    with setting(SHMEM, "advise"):
        with Arena.create(size, "auto") as arena:
            if arena.page_kind == "4KiB":
                assert "came on huge pages" in arena.notes[-1]
                pytest.skip(arena.notes[-1])
            assert arena.page_kind == "shmem-huge"
            assert len(arena.notes) == 1
            assert os.lseek(arena.fd, 0, os.SEEK_HOLE) == size
        with Arena.create(size, "never") as arena:
            assert arena.page_kind == "4KiB"
    with setting(SHMEM, "never"), pytest.raises(Full, match=r"shmem_enabled is 'never'"):
        Arena.create(size, "always")
