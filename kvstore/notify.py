"""Telling systemd how the daemon does: READY, STATUS, RELOADING, STOPPING, by one datagram each (sd_notify(3)).

Without a socket, as under a plain shell, every call does nothing. A notification that cannot be sent is logged, never
raised: supervision must not stop the service. Thread-safe.
"""

from __future__ import annotations

import logging
import socket
import time

_log = logging.getLogger(__name__)


class Notifier:
    """`address`: the value of $NOTIFY_SOCKET, a path or `@name` (abstract namespace); None or empty: no one asks."""

    def __init__(self, address: str | None) -> None:
        self._address = "\0" + address[1:] if address and address.startswith("@") else address or None

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, text: str, extend_s: float = 0) -> None:
        """A line for `systemctl status`. `extend_s`: start, reload or stop needs this much longer than from now on."""
        more = f"\nEXTEND_TIMEOUT_USEC={int(extend_s * 1e6)}" if extend_s else ""
        self._send(f"STATUS={text}{more}")

    def reloading(self) -> None:
        """To be followed by `ready`. Newer versions of systemd want the monotonic time with it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={status}")

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            _log.warning("systemd was not notified", extra={"fields": {"error": str(error)}})
