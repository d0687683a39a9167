"""What a volume asks of the file system besides moving chunks: lock, small files, errno mapping, O_DIRECT probe."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from threading import Condition
from types import TracebackType

from kvstore.errors import Closed, Full, InUse, Invalid, KVStoreError, Unavailable
from kvstore.units import PAGE_BYTES

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def typed(error: OSError, what: str) -> KVStoreError:
    """The one place where an errno becomes an error of this project. Only the lack of space is Full."""
    text = f"{what}: {os.strerror(error.errno) if error.errno else error}"
    return Full(text) if error.errno in _FULL else Unavailable(text)


class Gate:
    """Counts the calls in flight, so that close waits for them and later ones raise Closed. Thread-safe."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._condition = Condition()
        self._calls = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._condition:
            if self._closed:
                raise Closed(f"{self._what} is closed")
            self._calls += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._condition:
            self._calls -= 1
            if self._closed and not self._calls:
                self._condition.notify_all()

    def close(self) -> bool:
        """True for the first caller, once nothing is in flight any more; False for later ones."""
        with self._condition:
            if self._closed:
                return False
            self._closed = True
            self._condition.wait_for(lambda: not self._calls)
            return True


def lock_folder(path: Path) -> int:
    """Take the folder for this process; returns the fd that holds the lock until it is closed.

    Raises Unavailable, naming the holder's process id, where another process (or another open here) has it.
    """
    try:
        fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise typed(error, f"cannot write to the SSD folder {path}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise InUse(f"the SSD folder {path} is in use by process {holder}") from error
    except OSError as error:
        os.close(fd)
        raise typed(error, f"cannot lock the SSD folder {path}") from error
    return fd


def sync_folder(path: Path) -> None:
    """Make creations, renames and removals in a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, content: bytes) -> None:
    """Old content or new content after any crash, never a mixture."""
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    try:
        written = os.write(fd, content)
        if written != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    sync_folder(path.parent)


def probe_direct(folder: Path, mode: str) -> tuple[bool, str]:
    """(use O_DIRECT, why not). A page is really written: some file systems refuse only then.

    Raises Invalid where `mode` is "always" and the file system refuses.
    """
    if mode == "never":
        return False, "direct I/O is off by configuration: writes go through the page cache"
    probe = folder / "probe"
    page = mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o640)
        try:
            os.pwritev(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise typed(error, f"cannot write to the SSD folder {folder}") from error
        if mode == "always":
            raise Invalid(f"ssd.direct is `always`, but the file system of {folder} refuses direct I/O") from error
        return False, f"the file system of {folder} refuses direct I/O: writes go through the page cache"
    finally:
        page.close()
        probe.unlink(missing_ok=True)
    return True, ""
