"""`kvstore flush`: wait until every write to SSD that is wanted has ended."""

from __future__ import annotations

from kvstore.cli.options import Daemon, daemon_command
from kvstore.cli.output import Output, counted


@daemon_command("flush")
def flush(output: Output, daemon: Daemon) -> None:
    """Write what waits for the SSD now.

    Returns when everything is there. Use it before a planned power-off. `systemctl stop kvstore` does the same within
    its deadline.
    """
    result = daemon.call("flush")
    output.document(**result)
    output.line(f"{counted(result['written'], 'chunk')} written")
