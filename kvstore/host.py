"""What this machine and its cgroup allow: memory for the arena, space for a volume, folders that are ours.

A budget that cannot fit is refused at start with the numbers, not found out by the out-of-memory killer. Thread-safe.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import Denied, Invalid, Unavailable
from kvstore.units import GiB, MiB, format_size, parse_size

ARENA_STEP_BYTES = 2 * MiB
"""A huge page."""
VOLUME_STEP_BYTES = 64 * MiB
"""Volumes are cut into segments of this size (kvstore.slab): a rest below it would lie idle."""
DAEMON_BYTES = 128 * MiB
"""Left for the daemon itself (interpreter, index, I/O buffers) when the arena is checked against the memory."""
AUTO_VOLUME_BYTES = 64 * GiB


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that this process may still take, and who says so."""

    available_bytes: int
    limited_by: str
    """`the machine` or `cgroup NAME`."""
    hugetlb_free_bytes: int
    """Free huge pages: outside of `available_bytes` and of the memory cgroup."""


def read_memory(filesystem: Path = Path("/")) -> Memory:
    """The tightest of MemAvailable and the limits of this process's cgroup and its ancestors (v1 and v2).

    filesystem: where `proc` and `sys` are found.
    """
    fields = {}
    for line in (filesystem / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0])
    best = Memory(
        available_bytes=fields["MemAvailable"] * 1024,
        limited_by="the machine",
        hugetlb_free_bytes=fields.get("HugePages_Free", 0) * fields.get("Hugepagesize", 0) * 1024,
    )
    for folder, limit_name, usage_name, cache_name in _memory_cgroups(filesystem):
        left = _left_bytes(folder, limit_name, usage_name, cache_name)
        if left is not None and left < best.available_bytes:
            name = "/" + str(folder.relative_to(filesystem / "sys/fs/cgroup")).removeprefix(".")
            best = Memory(left, f"cgroup {name}", best.hugetlb_free_bytes)
    return best


def _memory_cgroups(filesystem: Path) -> list[tuple[Path, str, str, str]]:
    """(folder, limit file, usage file, field of memory.stat) of the process's memory cgroup and all its ancestors.

    In a container the path of /proc/self/cgroup may be that of the host, which is not mounted: only what exists counts.
    """
    mount = filesystem / "sys/fs/cgroup"
    out = []
    try:
        lines = (filesystem / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, top = ("memory.max", "memory.current", "inactive_file"), mount
        elif "memory" in controllers.split(","):
            names, top = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), mount / "memory"
        else:
            continue
        folder = top / path.lstrip("/")
        folders = [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]
        out += [(each, *names) for each in folders if (each / names[0]).exists()]
    return out


def _left_bytes(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Limit less usage, where cold page cache does not count as usage; None without a limit."""
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        stats = (folder / "memory.stat").read_text().split()
    except OSError:
        return None
    if limit == "max":
        return None
    values = dict(zip(stats[::2], stats[1::2], strict=False))
    return max(0, int(limit) - usage + int(values.get(cache_name, 0)))


def arena_bytes(size: str, huge_pages: str, memory: Memory) -> int:
    """The arena's size from `arena.size`, in whole steps. Raises Invalid, with the numbers, where it cannot fit."""
    wanted = parse_size(size, memory.available_bytes)
    rounded = wanted // ARENA_STEP_BYTES * ARENA_STEP_BYTES
    if rounded == 0:
        raise Invalid(
            f"arena.size {size} is {format_size(wanted)}, the least is {format_size(ARENA_STEP_BYTES)}"
            f" ({memory.limited_by} has {format_size(memory.available_bytes)} free)"
        )
    in_hugetlb = huge_pages != "never" and memory.hugetlb_free_bytes >= rounded
    if not in_hugetlb and rounded + DAEMON_BYTES > memory.available_bytes:
        raise Invalid(
            f"arena.size {size} does not fit: {format_size(rounded)} for the arena and {format_size(DAEMON_BYTES)} for"
            f" the daemon are more than the {format_size(memory.available_bytes)} that {memory.limited_by} has free;"
            f" set arena.size to at most {format_size(max(0, memory.available_bytes - DAEMON_BYTES))}"
        )
    return rounded


def volume_bytes(size: str, path: Path, sharing: int = 1) -> int:
    """The cap of the volume in `path` (made later where absent) from `ssd.size`.

    A share counts from the space that is free or taken by this volume already, so that the cap does not shrink as the
    volume fills, and is divided by `sharing`, the number of volumes on this file system.
    Raises Invalid with the numbers where less than one segment is left.
    """
    free = free_bytes(existing_parent(path)) + used_bytes(path)
    wanted = min(AUTO_VOLUME_BYTES, free // 2 // sharing) if size == "auto" else parse_size(size, free // sharing)
    rounded = wanted // VOLUME_STEP_BYTES * VOLUME_STEP_BYTES
    if rounded == 0:
        raise Invalid(
            f"ssd.size {size} in {path} is {format_size(wanted)}, the least is {format_size(VOLUME_STEP_BYTES)}"
            f" ({format_size(free)} are free there); free some space or set ssd.paths to another folder"
        )
    return rounded


def floor_bytes(size: str, path: Path) -> int:
    """`ssd.free_space_floor` in bytes; a share counts from the whole file system of `path`. Raises Unavailable."""
    space = _space(existing_parent(path))
    return parse_size(size, space.f_blocks * space.f_frsize)


def free_bytes(path: Path) -> int:
    """What an unprivileged writer can still allocate on the file system of `path`. Raises Unavailable."""
    space = _space(path)
    return space.f_bavail * space.f_frsize


def _space(path: Path) -> os.statvfs_result:
    try:
        return os.statvfs(path)
    except OSError as error:
        raise Unavailable(
            f"cannot look at the file system of {path}: {(error.strerror or str(error)).lower()}"
        ) from error


def used_bytes(path: Path) -> int:
    """What the files under `path` take on the device."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def existing_parent(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists: what it would be made in."""
    return next(each for each in (path, *path.parents) if each.exists())


def make_folder(path: Path, mode: int = 0o700) -> bool:
    """Make `path` and its parents where absent; True where its mode keeps other users out.

    In a folder where everybody may write (/tmp), it must be a real folder of this user and is made 0700 whatever `mode`
    says: otherwise somebody else could have put it there. Raises Denied, Invalid, Unavailable with one sentence.
    """
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            shared = path.parent.stat().st_mode & stat.S_ISVTX
            path.mkdir(mode=0o700)
            path.chmod(0o700 if shared else mode)
        about, shared = path.lstat(), path.parent.stat().st_mode & stat.S_ISVTX
    except PermissionError as error:
        raise Denied(f"cannot make the folder {path}: permission denied; choose another or run as its owner") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise Invalid(f"cannot make the folder {path}: there is a file in the way") from error
    except OSError as error:
        raise Unavailable(f"cannot make the folder {path}: {(error.strerror or str(error)).lower()}") from error
    if shared and (not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022):
        raise Denied(f"{path} is not a private folder of this user: remove it or choose another place")
    return not about.st_mode & 0o011
