"""The ladder by which the arena gets its memory: huge-page memfd, shared memory with huge pages, 4 KiB pages.

A rung that is not taken leaves one sentence in `notes`. Every rung ends in a memfd that is fully allocated (a hole
would be a SIGBUS in whoever touches it), mapped and paged in. Order: map, page in (in parallel, clears the pages),
then posix_fallocate, which proves that there is no hole: 0.27 s/GiB, and 0.25 s/GiB the other way round (measured,
2 cores), but only this order lets shared memory take huge pages on advice.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from kvstore.arena import populate
from kvstore.errors import Full, Invalid, KVStoreError
from kvstore.units import MiB, format_size

HugePages = Literal["auto", "always", "never"]
PageKind = Literal["hugetlb", "shmem-huge", "4KiB"]
HUGE_BYTES = 2 * MiB
"""Arena sizes are multiples of this, whatever the page kind."""
_MFD_HUGE_2MB = 21 << 26
_SHMEM_SETTINGS = ("shmem_enabled", "hugepages-2048kB/shmem_enabled")
_HUGE_ENOUGH = 0.9
"""Share of the arena that must really be on huge pages before we say so."""


@dataclass(frozen=True, slots=True)
class Memory:
    fd: int
    mapping: mmap.mmap
    page_kind: PageKind
    notes: list[str]

    @property
    def address(self) -> int:
        return address_of(self.mapping)


def address_of(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def obtain(size_bytes: int, huge_pages: HugePages, progress: populate.Progress | None = None) -> Memory:
    """Climb down the ladder. `size_bytes` is a multiple of HUGE_BYTES.

    Raises Full with one sentence where memory is too small, or where `always` is asked for and no huge pages are had.
    """
    notes: list[str] = []
    if huge_pages == "never":
        return _shared_memory(size_bytes, False, notes, progress)
    memory = _hugetlb(size_bytes, notes, progress)
    if memory is not None:
        return memory
    advised = _shmem_advised(notes)
    if huge_pages == "always" and not advised:
        raise Full(f"no huge pages for an arena of {format_size(size_bytes)}: {'; '.join(notes)}")
    memory = _shared_memory(size_bytes, advised, notes, progress)
    if huge_pages == "always" and memory.page_kind == "4KiB":
        release(memory)
        raise Full(f"no huge pages for an arena of {format_size(size_bytes)}: {'; '.join(notes)}")
    return memory


def release(memory: Memory) -> None:
    with suppress(BufferError):  # a view in a traceback: the mapping goes with it
        memory.mapping.close()
    os.close(memory.fd)


def allocate(name: str, size_bytes: int, flags: int = 0) -> tuple[int, mmap.mmap]:
    """A memfd of that length and its writable mapping, no pages in it yet. Raises OSError, and leaves nothing open."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size_bytes)
        return fd, mmap.mmap(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise


def fill(fd: int, mapping: mmap.mmap, progress: populate.Progress | None = None) -> None:
    """Page in the whole mapping and prove that its file has no hole. Raises OSError."""
    try:
        populate.populate(address_of(mapping), len(mapping), progress)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.posix_fallocate(fd, 0, len(mapping))
        populate.touch(memoryview(mapping), progress)
    os.posix_fallocate(fd, 0, len(mapping))


def _hugetlb(size_bytes: int, notes: list[str], progress: populate.Progress | None) -> Memory | None:
    """The top rung. What it took of the pool is given back (fd closed) before the next rung is tried."""
    try:
        fd, mapping = allocate("kvstore-arena", size_bytes, os.MFD_HUGETLB | _MFD_HUGE_2MB)
    except OSError as error:
        notes.append(f"hugetlb not taken: {_why_no_pool(size_bytes, error)}")
        return None
    memory = Memory(fd, mapping, "hugetlb", notes)
    try:
        fill(fd, mapping, progress)
    except OSError as error:
        release(memory)
        notes.append(f"hugetlb not taken: {_why_no_pool(size_bytes, error)}")
        return None
    except BaseException:
        release(memory)
        raise
    return memory


def _why_no_pool(size_bytes: int, error: OSError) -> str:
    if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT):
        return f"the kernel refuses a huge-page memfd ({os.strerror(error.errno or 0)})"
    values = meminfo()
    free = values.get("HugePages_Free", 0) - values.get("HugePages_Rsvd", 0)
    return f"it needs {size_bytes // HUGE_BYTES} huge pages of 2 MiB and {free} are free (sysctl vm.nr_hugepages)"


def _shmem_advised(notes: list[str]) -> bool:
    """Whether this system gives shared memory huge pages on advice or always (kernel document transhuge.rst)."""
    chosen = []
    for name in _SHMEM_SETTINGS:
        try:
            text = Path("/sys/kernel/mm/transparent_hugepage", name).read_text()
        except OSError:
            continue
        chosen.append(text[text.find("[") + 1 : text.find("]")])
    whole, *by_size = chosen or ["absent"]
    setting = by_size[0] if by_size and by_size[0] != "inherit" and whole not in ("deny", "force") else whole
    if setting in ("advise", "always", "within_size", "force"):
        return True
    notes.append(f"shmem-huge not taken: /sys/kernel/mm/transparent_hugepage/shmem_enabled is {setting!r}")
    return False


def _shared_memory(size_bytes: int, advised: bool, notes: list[str], progress: populate.Progress | None) -> Memory:
    available = meminfo().get("MemAvailable", size_bytes)
    if size_bytes > available:
        raise _too_small(size_bytes, f"{format_size(available)} of memory are available")
    try:
        fd, mapping = allocate("kvstore-arena", size_bytes)
    except OSError as error:
        raise _too_small(size_bytes, os.strerror(error.errno or 0)) from error
    memory = Memory(fd, mapping, "4KiB", notes)
    try:
        _advise_huge(memory, advised)
        fill(fd, mapping, progress)
    except OSError as error:
        release(memory)
        raise _too_small(size_bytes, os.strerror(error.errno or 0)) from error
    except BaseException:
        release(memory)
        raise
    if not advised:
        return memory
    huge = _huge_bytes(memory.address)
    if huge < size_bytes * _HUGE_ENOUGH:
        notes.append(f"shmem-huge not taken: only {format_size(huge)} of {format_size(size_bytes)} came on huge pages")
        return memory
    return Memory(fd, mapping, "shmem-huge", notes)


def _advise_huge(memory: Memory, advised: bool) -> None:
    try:
        populate.advise(memory.address, len(memory.mapping), populate.HUGEPAGE if advised else populate.NOHUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel without transparent huge pages
            raise


def _too_small(size_bytes: int, why: str) -> KVStoreError:
    return Full(f"an arena of {format_size(size_bytes)} cannot be had: {why}; lower arena.size")


def _huge_bytes(address: int) -> int:
    """How much of the mapping that starts at `address` is mapped by huge pages, as the kernel says."""
    found = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            head = line.split(maxsplit=1)[0]
            if "-" in head and not head.endswith(":"):
                start, end = (int(part, 16) for part in head.split("-"))
                found = start <= address < end
            elif found and head == "ShmemPmdMapped:":
                return int(line.split()[1]) * 1024
    return 0


def meminfo() -> dict[str, int]:
    """/proc/meminfo: bytes, or counts for the HugePages_ rows. Empty where there is no /proc."""
    try:
        rows = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    values: dict[str, int] = {}
    for row in rows:
        name, _, rest = row.partition(":")
        number, *unit = rest.split()
        values[name] = int(number) * (1024 if unit else 1)
    return values


def check_size(size_bytes: int) -> None:
    """Raises Invalid for a size that no arena can have."""
    if size_bytes < 1 or size_bytes > 1 << 46:
        raise Invalid(f"an arena of {size_bytes} bytes is not possible: from 1 byte to 64 TiB")
