"""Who is at the other end of a unix socket: credentials as the kernel knows them, and a descriptor of the process.

A pidfd is readable once the process has exited, that is after its memory was given up: from then on nobody writes into
the arena through it. A pid alone may be reused (pidfd_open(2), unix(7)).
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass

from kvstore.errors import Denied, Unavailable

SO_PEERPIDFD = 77
"""asm-generic/socket.h, Linux 6.5; the socket module has no name for it."""
_UCRED = struct.Struct("3i")


@dataclass(slots=True)
class Peer:
    """One end of one connection. Owns `pidfd` until `take_pidfd` or `close`."""

    pid: int
    """0 where the process is in a pid namespace that this daemon cannot see (another container)."""
    uid: int
    gid: int
    pidfd: int
    identity: tuple[int, int]
    """Equal for two connections of one living process, and for nothing else while that process lives."""

    def take_pidfd(self) -> int:
        """The caller closes it from now on."""
        pidfd, self.pidfd = self.pidfd, -1
        return pidfd

    def close(self) -> None:
        """Idempotent."""
        if self.pidfd >= 0:
            os.close(self.take_pidfd())


def identify(connected: socket.socket) -> Peer:
    """Raises Unavailable where the peer has exited already, Denied where its process cannot be watched."""
    pid, uid, gid = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    pidfd = _peer_pidfd(connected, pid)
    unique = _unique_inode(pidfd)
    # Without pid and unique inode two processes look alike: then every connection is a process of its own, named by
    # the number of its pidfd, which nothing else has while it is open.
    identity = (pid, unique) if pid or unique else (0, -pidfd)
    return Peer(pid, uid, gid, pidfd, identity)


def has_exited(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _peer_pidfd(connected: socket.socket, pid: int) -> int:
    try:
        return connected.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENODATA):
            raise Unavailable(f"process {pid} has exited before it was greeted") from error
        if error.errno != errno.ENOPROTOOPT:
            raise
    if pid == 0:
        raise Denied("the client is in a pid namespace that is not visible here: that needs Linux 6.5 or newer")
    try:
        # Should the pid have been reused meanwhile, another process is watched: slots come back late, never early.
        return os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise Unavailable(f"process {pid} has exited before it was greeted") from error


def _unique_inode(pidfd: int) -> int:
    """The inode, where pidfds have a file system of their own with one inode a process (Linux 6.9), else 0."""
    status = os.fstat(pidfd)
    anonymous = select.epoll()
    try:
        shared = os.fstat(anonymous.fileno()).st_dev == status.st_dev
    finally:
        anonymous.close()
    return 0 if shared else status.st_ino
