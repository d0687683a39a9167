"""Faults of disk and folder: each a clear error or a miss, never wrong bytes, nothing lost that was not touched."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ssd_rig import SIZE_BYTES, SMALL, UNIT_BYTES, Rig, file_of, flip, flip_header, flip_payload, swap

from kvstore.backends.ssd import SSDVolume
from kvstore.backends.ssd.formats import FORMAT_VERSION
from kvstore.errors import Corrupt, Full, Invalid, Unavailable
from kvstore.record import HEADER_BYTES
from kvstore.testing.chunks import aligned, filled, layout_of
from kvstore.units import MiB

CHILD = Path(__file__).with_name("ssd_child.py")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.volume.close()


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A small tmpfs of its own, or the reason why not."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Take what space the file system has left."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    old = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, old)


# -- one volume, one process -------------------------------------------------------------------------------------------


def test_a_second_process_is_told_who_has_the_folder(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, str(CHILD), "hold", str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    with holder.stdout, holder.stdin:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(Unavailable, match=f"in use by process {holder.pid}"):
            SSDVolume.open(tmp_path, SIZE_BYTES)
        holder.stdin.close()
        assert holder.wait(10) == 0
    Rig(tmp_path).volume.close()


def test_a_second_open_in_one_process_is_refused_too(rig: Rig) -> None:
    with pytest.raises(Unavailable, match=f"process {os.getpid()}"):
        SSDVolume.open(rig.folder, SIZE_BYTES)
    assert rig.intact(rig.store(1))


# -- damage on disk ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 8, 12, 40, 70, 100, 150, 180])
def test_a_flipped_header_byte_is_never_a_hit(rig: Rig, offset: int) -> None:
    items = rig.store(3)
    flip_header(rig.folder, items[1], offset)
    with pytest.raises(Corrupt):
        rig.read(items[1])
    assert rig.volume.contains(items) == [True, False, True]
    assert rig.intact([items[0], items[2]])


def test_swapped_records_are_both_misses(rig: Rig) -> None:
    items = rig.store(3)
    swap(rig.folder, items[0], items[2])
    assert rig.read(items[0]) is None
    assert rig.read(items[2]) is None
    assert rig.intact(items[1:2])
    rig.volume.close()
    shutil.rmtree(rig.folder / "index")
    again = Rig(rig.folder)
    assert again.loaded_keys() == {items[1].key}
    again.volume.close()


def test_a_lost_write_is_a_miss(rig: Rig) -> None:
    """The device said yes and wrote nothing: the old record is still there, under another identity or sequence."""
    (old,) = rig.store(1)
    path, start = file_of(rig.folder, old)
    before = path.read_bytes()[start : start + HEADER_BYTES + SMALL.slot_bytes]
    new = old.at(old.place, rig.sequence + 1)
    rig.volume.write([new], filled([new]), True)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(before)
    assert rig.read(new) is None


def test_a_torn_write_is_corrupt(rig: Rig) -> None:
    """The new header with the old payload's second half."""
    (old,) = rig.store(1)
    path, start = file_of(rig.folder, old)
    half = SMALL.slot_bytes // 2
    new = old.at(old.place, rig.sequence + 1)
    buffer = aligned(SMALL.slot_bytes)
    rig.volume.write([new], [buffer], True)
    with path.open("r+b") as file:
        file.seek(start + HEADER_BYTES + half)
        file.write(b"\1" * half)
    with pytest.raises(Corrupt):
        rig.read(new)


def test_a_truncated_segment_hurts_only_its_tail(rig: Rig) -> None:
    items = rig.store(4)
    path, start = file_of(rig.folder, items[2])
    rig.volume.close()
    os.truncate(path, start + HEADER_BYTES + 100)
    again = Rig(rig.folder)
    assert any("cut short" in note for note in again.volume.notes)
    assert again.intact(items[:2])
    with pytest.raises(Corrupt):
        again.read(items[2])
    assert again.read(items[3]) is None
    assert again.volume.write([items[3]], filled([items[3]]), True) == [None]
    assert again.intact([items[3]])
    again.volume.close()


def test_many_reads_tell_each_outcome(rig: Rig) -> None:
    items = rig.store(5)
    flip_payload(rig.folder, items[1])
    flip_header(rig.folder, items[2])
    rig.volume.delete(items[3:4])
    buffers = [aligned(SMALL.slot_bytes) for _ in items]
    outcomes = rig.volume.read_many(items, buffers)
    assert [o if isinstance(o, bool) else type(o) for o in outcomes] == [True, Corrupt, Corrupt, False, True]
    assert bytes(buffers[4]) == bytes(filled(items[4:])[0])


# -- formats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "word"), [(FORMAT_VERSION - 1, "older"), (FORMAT_VERSION + 1, "newer")])
def test_another_format_is_refused_and_left_alone(rig: Rig, version: int, word: str) -> None:
    rig.store(1)
    rig.volume.close()
    file = rig.folder / "VOLUME"
    block = bytearray(file.read_bytes())
    block[8:12] = version.to_bytes(4, "little")
    file.write_bytes(block)
    before = {path: path.read_bytes() for path in rig.folder.rglob("*.kvs")}
    with pytest.raises(Invalid, match=f"{word} on-disk format {version}"):
        SSDVolume.open(rig.folder, SIZE_BYTES)
    assert file.read_bytes() == bytes(block)
    assert {path: path.read_bytes() for path in rig.folder.rglob("*.kvs")} == before


def test_a_damaged_or_missing_superblock_is_refused_and_left_alone(rig: Rig) -> None:
    items = rig.store(1)
    rig.volume.close()
    file = rig.folder / "VOLUME"
    good = file.read_bytes()
    flip(file, 20)
    with pytest.raises(Corrupt, match="checksum"):
        SSDVolume.open(rig.folder, SIZE_BYTES)
    file.unlink()
    with pytest.raises(Corrupt, match="missing beside segment files"):
        SSDVolume.open(rig.folder, SIZE_BYTES)
    file.write_bytes(good)
    again = Rig(rig.folder)
    assert again.intact(items)
    again.volume.close()


def test_sizes_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="smaller than one unit"):
        SSDVolume.open(tmp_path, UNIT_BYTES - 1, unit_bytes=UNIT_BYTES)
    assert not (tmp_path / "VOLUME").exists()
    Rig(tmp_path).volume.close()
    with pytest.raises(Invalid, match="was made with units"):
        SSDVolume.open(tmp_path, SIZE_BYTES, unit_bytes=2 * UNIT_BYTES)


def test_calls_that_cannot_work_are_refused(rig: Rig) -> None:
    (item,) = rig.items(1)
    outside = item.at(item.place + 4096, 9)
    (error,) = rig.volume.write([outside], filled([outside]))
    assert isinstance(error, Invalid)
    assert rig.read(outside) is None
    with pytest.raises(Invalid, match="outside"):
        rig.volume.format_segment(15, 2, 8192)
    with pytest.raises(Invalid, match="multiple of 4 KiB"):
        rig.volume.format_segment(0, 1, 5000)
    with pytest.raises(Invalid, match="4 KiB boundary"):
        rig.volume.read_into(item, aligned(SMALL.slot_bytes + 4096)[1 : SMALL.slot_bytes + 1])


# -- no space, no permission, no descriptors ---------------------------------------------------------------------------


@pytest.mark.root("mounts a small tmpfs")
def test_a_full_disk_refuses_and_recovers(tmp_path: Path) -> None:
    """ENOSPC on data and on the index: stores are refused, reads go on, and writing works again once there is space."""
    with mounted(tmp_path / "disk", "-o", "size=24m") as disk:
        rig = Rig(disk)
        items = rig.store(3)
        ballast = disk / "ballast"
        fill(ballast)
        with pytest.raises(Full, match="cannot allocate segment 4"):
            rig.volume.format_segment(4, 1, 8192)
        assert not (disk / "segments" / "000004.kvs").exists()
        assert rig.intact(items)
        full = 0
        for _ in range(40):
            more = rig.items(4)
            results = rig.volume.write(more, filled(more), True)
            full += any(isinstance(result, Full) for result in results)
            assert all(result is None or isinstance(result, (Full, Unavailable)) for result in results)
        assert rig.intact(items)
        ballast.unlink()
        late = rig.store(4)
        rig.volume.format_segment(4, 1, 8192)
        rig.volume.close()
        again = Rig(disk)
        assert {item.key for item in items + late} <= again.loaded_keys()
        assert again.intact(items + late)
        again.volume.close()


@pytest.mark.root("mounts a small tmpfs")
def test_a_full_disk_at_the_first_open(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-o", "size=64k") as disk:
        (disk / "ballast").write_bytes(bytes(60 * 1024))
        with pytest.raises((Full, Unavailable), match=r"No space|cannot"):
            SSDVolume.open(disk / "volume", SIZE_BYTES, unit_bytes=UNIT_BYTES)


@pytest.mark.root("mounts and remounts a small tmpfs")
def test_read_only_at_the_start_and_in_the_middle(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-o", "size=32m") as disk:
        rig = Rig(disk)
        items = rig.store(2)
        rig.volume.close()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(Unavailable, match=r"cannot write to the SSD folder .*Read-only"):
            SSDVolume.open(disk, SIZE_BYTES)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        again = Rig(disk)
        assert again.intact(items)
        again.volume.close()


def test_a_folder_without_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root is not bound by permissions; the read-only mount covers this for root")
    tmp_path.chmod(0o500)
    with pytest.raises(Unavailable, match="cannot write to the SSD folder"):
        SSDVolume.open(tmp_path, SIZE_BYTES)
    tmp_path.chmod(0o700)


def test_too_many_open_files_deletes_nothing(rig: Rig) -> None:
    """EMFILE at a read, at an open and at a rebuild: Unavailable each time, and all is there afterwards."""
    items = rig.store(3)
    rig.volume.close()
    again = Rig(rig.folder)
    with limited(resource.RLIMIT_NOFILE, max(int(n) for n in os.listdir("/proc/self/fd")) + 1):
        again.volume._files.close()
        blockers = [os.open("/dev/null", os.O_RDONLY) for _ in range(_free_descriptors())]
        try:
            with pytest.raises(Unavailable, match="Too many open files"):
                again.read(items[0])
        finally:
            for fd in blockers:
                os.close(fd)
    assert again.intact(items)
    again.volume.close()
    shutil.rmtree(rig.folder / "index")
    for spare in range(24):
        before = sorted(os.listdir(rig.folder / "segments"))
        top = max(int(n) for n in os.listdir("/proc/self/fd")) + 1
        with limited(resource.RLIMIT_NOFILE, top + spare), suppress(Unavailable):
            Rig(rig.folder).volume.close()
        assert sorted(os.listdir(rig.folder / "segments")) == before
    final = Rig(rig.folder)
    assert final.loaded_keys() == {item.key for item in items}
    assert final.intact(items)
    final.volume.close()


def _free_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - len(os.listdir("/proc/self/fd")) + 1


# -- the device says no, by strace -------------------------------------------------------------------------------------

FAULTY_CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from ssd_rig import Rig, SMALL
from kvstore.testing.chunks import filled
from kvstore.errors import KVStoreError
rig = Rig(Path(sys.argv[1]))
items = rig.items(6)
buffers = filled(items)
print("ready", flush=True)
durable = sys.argv[3] == "durable"
for item, buffer in zip(items, buffers):
    (result,) = rig.volume.write([item], [buffer], durable)
    print(type(result).__name__, flush=True)
for item in items:
    try:
        print(rig.read(item) is not None, flush=True)
    except KVStoreError as error:
        print(type(error).__name__, flush=True)
print(sorted(rig.volume.abandoned), rig.volume.read_only, flush=True)
rig.volume.close()
"""


def injected(folder: Path, inject: str, mode: str = "plain") -> list[str]:
    """Run the child above under strace, with a fault injected into its segment file's system calls."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    segment = folder / "segments" / "000000.kvs"
    call, _, rest = inject.partition(":")
    calls = f"{call},{call}2" if call.startswith("p") else call
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(segment), "-e", f"trace={calls}"]
    command += ["-e", f"inject={calls}:{rest}", sys.executable, "-c", FAULTY_CHILD, str(folder)]
    done = subprocess.run(
        [*command, str(Path(__file__).parent), mode], capture_output=True, text=True, timeout=60, cwd=folder.parent
    )
    if "ptrace" in done.stderr.lower():
        pytest.skip(f"tracing is not allowed here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[1:]


OK = "NoneType"


@pytest.mark.parametrize(
    ("inject", "kind"),
    [("pwritev:error=ENOSPC:when=3", "Full"), ("pwritev:error=EIO:when=3", "Unavailable")],
)
def test_a_failed_write_fails_its_own_chunk(tmp_path: Path, inject: str, kind: str) -> None:
    """when=3: the segment's header block is the first pwritev to the file."""
    said = injected(tmp_path / "volume", inject)
    assert said[:6] == [OK, kind, OK, OK, OK, OK]
    assert said[6:12] == ["True", "False", "True", "True", "True", "True"]
    assert said[12] == "[] False"


def test_a_file_system_that_turned_read_only(tmp_path: Path) -> None:
    said = injected(tmp_path / "volume", "pwritev:error=EROFS:when=3+")
    assert said[:6] == [OK] + ["Unavailable"] * 5
    assert said[6:] == ["True"] + ["False"] * 5 + ["[] True"]


def test_a_failed_sync_abandons_the_segment(tmp_path: Path) -> None:
    said = injected(tmp_path / "volume", "fdatasync:error=EIO:when=2", "durable")
    assert said[:6] == [OK] + ["Unavailable"] * 5, "no retry, and no later write into that segment"
    assert said[12] == "[0] False"


def test_a_failed_read_is_no_corruption(tmp_path: Path) -> None:
    said = injected(tmp_path / "volume", "preadv:error=EIO:when=2")
    assert said[:6] == [OK] * 6
    assert said[6:12] == ["True", "Unavailable"] + ["True"] * 4


def test_a_short_write_that_cannot_be_continued_fails(tmp_path: Path) -> None:
    """The kernel takes nothing more: the chunk is not reported as stored, and it is not served."""
    said = injected(tmp_path / "volume", "pwritev:retval=0:when=3+")
    assert said[:6] == [OK] + ["Unavailable"] * 5
    assert said[6:12] == ["True"] + ["False"] * 5


def test_a_file_size_limit_cuts_writes_short(rig: Rig) -> None:
    """A real short write: the limit lies inside the record; what fits is written, the rest fails, nothing is served."""
    items = rig.items(3, layout_of(512 * 1024))
    _, start = file_of(rig.folder, items[1])
    with limited(resource.RLIMIT_FSIZE, start + 64 * 1024):
        results = rig.volume.write(items[:1], filled(items[:1])) + rig.volume.write(items[1:], filled(items[1:]))
    assert [type(result) for result in results] == [type(None), Full, Full]
    assert rig.intact(items[:1])
    with pytest.raises(Corrupt):
        rig.read(items[1])
    assert rig.read(items[2]) is None
    assert rig.volume.write(items[1:], filled(items[1:])) == [None, None]
    assert rig.intact(items)


def test_the_folder_disappears(rig: Rig) -> None:
    """Open descriptors go on; what needs a path is Unavailable; nothing crashes and close still works."""
    items = rig.store(2)
    shutil.rmtree(rig.folder / "segments")
    assert rig.intact(items)
    with pytest.raises(Unavailable):
        rig.volume.format_segment(9, 1, 1 * MiB)
