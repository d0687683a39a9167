"""`kvstore flush`: write everything that is only in memory to SSD."""

from __future__ import annotations

from kvstore.cli.options import Daemon, daemon_command
from kvstore.cli.output import Output


@daemon_command("flush")
def flush(output: Output, daemon: Daemon) -> None:
    """Write all chunks that wait for it to SSD, and wait until they are there.

    Use it before a planned power-off. `systemctl stop kvstore` does the same within its deadline.
    """
    result = daemon.call("flush")
    output.document(**result)
    output.line(f"{result['written']} chunks written")
