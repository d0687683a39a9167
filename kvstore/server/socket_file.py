"""A listening unix socket at a path that one daemon owns at a time.

A lock file beside it decides who owns the path: the kernel drops the lock with its holder, so a socket file whose lock
is free is stale and is replaced. The lock file itself stays (removing a lock file is a race).
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import socket
import stat
from pathlib import Path

from kvstore.errors import Denied, Invalid, Unavailable

MAX_PATH_BYTES = 107
"""sockaddr_un.sun_path with its final NUL, unix(7)."""


class SocketFile:
    """Use `claim`. `listener` is non-blocking."""

    def __init__(self, path: Path, listener: socket.socket, lock_fd: int) -> None:
        self.path = path
        self.listener = listener
        self._lock_fd = lock_fd
        self._inode = os.stat(path).st_ino

    @classmethod
    def claim(cls, path: Path, mode: int, group: str | None, backlog: int) -> SocketFile:
        """Create the folder where needed, replace a stale socket, bind, set mode and group, listen.

        Raises Unavailable where a living daemon has the path, Invalid where the path cannot be one of a socket or the
        group does not exist, Denied where permissions forbid it.
        """
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise Invalid(f"a socket's path has at most {MAX_PATH_BYTES} bytes; {path} has {len(os.fsencode(path))}")
        group_id = _group_id(group)
        listener = None
        lock_fd = -1
        try:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock_fd = _lock(path)
            _remove_stale(path)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            listener.bind(os.fspath(path))
            if group_id is not None:
                os.chown(path, -1, group_id)
            os.chmod(path, mode)
            listener.listen(backlog)  # only now: until here a connect is refused, whatever the umask left open
            claimed = cls(path, listener, lock_fd)
            listener, lock_fd = None, -1
            return claimed
        except PermissionError as error:
            raise Denied(f"cannot make the socket {path}: {error.strerror}") from error
        except (FileExistsError, NotADirectoryError) as error:
            raise Invalid(f"cannot make the socket {path}: {error.strerror}") from error
        except OSError as error:
            raise Unavailable(f"cannot make the socket {path}: {error.strerror}") from error
        finally:
            if listener is not None:
                listener.close()
            if lock_fd >= 0:
                os.close(lock_fd)

    def close(self) -> None:
        """Stop listening, remove the socket where it is still ours, give the path free. Idempotent."""
        if self._lock_fd < 0:
            return
        self.listener.close()
        try:
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        except FileNotFoundError:
            pass
        os.close(self._lock_fd)
        self._lock_fd = -1


def _group_id(group: str | None) -> int | None:
    if group is None:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise Invalid(f"socket.group: there is no group {group!r} on this machine") from error


def _lock(path: Path) -> int:
    fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise Unavailable(f"another kvstore daemon (process {holder}) is serving {path}") from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _remove_stale(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise Invalid(f"{path} exists and is not a socket: remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        answer = probe.connect_ex(os.fspath(path))
    if answer not in (errno.ECONNREFUSED, errno.ENOENT):
        raise Unavailable(f"{path} belongs to a program that is running and is not a kvstore daemon")
    path.unlink(missing_ok=True)
