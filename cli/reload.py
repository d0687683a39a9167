"""`kvstore reload`: as SIGHUP, but with an answer."""

from __future__ import annotations

from kvstore.cli.options import Daemon, daemon_command
from kvstore.cli.output import Output


@daemon_command("reload")
def reload(output: Output, daemon: Daemon) -> None:
    """Let the daemon read its settings again.

    The same as SIGHUP, with an answer. Where the new settings have an error, the old ones stay and the error is printed
    (exit code 2).
    """
    result = daemon.call("reload")
    output.document(**result)
    changed, restart = result.get("changed", []), result.get("needs_restart", [])
    output.line(f"changed: {', '.join(changed)}" if changed else "nothing that a reload can change is different")
    if restart:
        output.line(f"needs a restart: {', '.join(restart)}", "yellow")
