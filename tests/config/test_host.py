"""Memory limits by cgroup v1 and v2, read from a file tree as the kernel lays it out; budgets that cannot fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.errors import Denied, Invalid
from kvstore.host import (
    AUTO_VOLUME_BYTES,
    Memory,
    arena_bytes,
    floor_bytes,
    free_bytes,
    make_folder,
    read_memory,
    volume_bytes,
)
from kvstore.units import GiB, MiB


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A tree with 64 GiB available and the given cgroup membership and files."""
    meminfo = "MemTotal: 67108864 kB\nMemAvailable: 67108864 kB\nHugePages_Free: 512\nHugepagesize: 2048 kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/memory.max": "max\n", "sys/fs/cgroup/a/memory.current": "5\n"}
    memory = read_memory(machine(tmp_path, "0::/a\n", {**files, "sys/fs/cgroup/a/memory.stat": ""}))
    assert memory == Memory(64 * GiB, "the machine", 1 * GiB)


def test_the_tightest_ancestor_decides_and_cold_cache_does_not_count(tmp_path: Path) -> None:
    def group(name: str, limit: str, usage: int, cache: int) -> dict[str, str]:
        at = f"sys/fs/cgroup/{name}"
        stats = f"anon 1\ninactive_file {cache}\n"
        return {f"{at}/memory.max": limit, f"{at}/memory.current": str(usage), f"{at}/memory.stat": stats}

    files = group("pod", str(8 * GiB), 3 * GiB, 1 * GiB) | group("pod/box", str(16 * GiB), 1 * GiB, 0)
    memory = read_memory(machine(tmp_path, "0::/pod/box\n", files))
    assert memory == Memory(6 * GiB, "cgroup /pod", 1 * GiB)


def test_version_1_in_a_container_that_does_not_see_its_own_path(tmp_path: Path) -> None:
    """/proc/self/cgroup names the host's path, but the container has its own cgroup mounted at the top."""
    at = "sys/fs/cgroup/memory"
    files = {
        f"{at}/memory.limit_in_bytes": str(2 * GiB),
        f"{at}/memory.usage_in_bytes": str(GiB),
        f"{at}/memory.stat": f"cache 1\ntotal_inactive_file {GiB // 2}\n",
    }
    memory = read_memory(machine(tmp_path, "4:memory:/docker/abc\n0::/\n", files))
    assert memory == Memory(GiB + GiB // 2, "cgroup /memory", 1 * GiB)


def test_the_share_counts_from_what_is_free_and_comes_in_whole_huge_pages() -> None:
    assert arena_bytes("30%", "auto", Memory(10 * GiB, "the machine", 0)) == 3 * GiB
    assert arena_bytes("100.1MiB", "auto", Memory(10 * GiB, "the machine", 0)) == 100 * MiB


def test_an_arena_that_cannot_fit_is_refused_with_the_numbers() -> None:
    """Fault 57: a cgroup tighter than the budget must not end in the out-of-memory killer."""
    tight = Memory(1 * GiB, "cgroup /pod", 0)
    with pytest.raises(Invalid, match=r"arena\.size 8GiB does not fit: 8 GiB .* 1 GiB that cgroup /pod has .* 896 MiB"):
        arena_bytes("8GiB", "auto", tight)
    with pytest.raises(Invalid, match=r"is 1\.5 MiB, the least is 2 MiB"):
        arena_bytes("30%", "auto", Memory(5 * MiB, "the machine", 0))


def test_reserved_huge_pages_are_not_charged_to_the_memory() -> None:
    reserved = Memory(1 * GiB, "cgroup /pod", 8 * GiB)
    assert arena_bytes("8GiB", "always", reserved) == 8 * GiB
    with pytest.raises(Invalid, match="does not fit"):
        arena_bytes("8GiB", "never", reserved)


def test_the_automatic_cap_does_not_shrink_as_the_volume_fills(tmp_path: Path) -> None:
    """A volume that took half of the free space at its first start would be cut to a quarter at its second."""
    empty = volume_bytes("auto", tmp_path / "ssd")
    assert 64 * MiB <= empty <= AUTO_VOLUME_BYTES
    (tmp_path / "ssd").mkdir()
    with (tmp_path / "ssd" / "segment").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 256 * MiB)
    assert volume_bytes("auto", tmp_path / "ssd") >= empty - 64 * MiB
    assert volume_bytes("auto", tmp_path / "ssd", sharing=2) <= empty // 2 + 64 * MiB


def test_sizes_of_volumes_and_floors(tmp_path: Path) -> None:
    assert volume_bytes("300MiB", tmp_path) == 256 * MiB
    assert abs(volume_bytes("10%", tmp_path) - free_bytes(tmp_path) // 10) < 256 * MiB
    assert floor_bytes("0", tmp_path) == 0
    assert floor_bytes("10%", tmp_path) == int(os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize * 10 / 100)
    with pytest.raises(Invalid, match=r"ssd\.size 1MiB .* the least is 64 MiB"):
        volume_bytes("1MiB", tmp_path)


def test_a_folder_in_a_shared_place_is_private_or_refused(tmp_path: Path) -> None:
    """Somebody may have made our folder in /tmp before us, to be handed our sockets and volumes."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    assert make_folder(shared / "mine", 0o755)
    assert (shared / "mine").stat().st_mode & 0o777 == 0o700
    (shared / "link").symlink_to(tmp_path)
    with pytest.raises(Denied, match="is not a private folder of this user"):
        make_folder(shared / "link")
    (shared / "mine").chmod(0o777)
    with pytest.raises(Denied, match="is not a private folder of this user"):
        make_folder(shared / "mine")
    assert not make_folder(tmp_path / "open", 0o755)
    (tmp_path / "file").touch()
    with pytest.raises(Invalid, match="a file in the way"):
        make_folder(tmp_path / "file" / "below")
