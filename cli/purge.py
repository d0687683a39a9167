"""`kvstore purge ROOT`: remove everything of one model and request identity."""

from __future__ import annotations

import click

from kvstore.cli.exit import Exit, Failure
from kvstore.cli.options import Daemon, daemon_command
from kvstore.cli.output import Output, counted


@daemon_command("purge")
@click.argument("root")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def purge(output: Output, daemon: Daemon, root: str, yes: bool) -> None:
    """Remove all chunks of one root.

    They go from every tier and do not come back after a crash.

    ROOT is the whole hexadecimal name of a root, or a beginning that only one root has (see `kvstore ls`).

    \b
    Example:
      kvstore purge 3fa9 --yes
    """
    if not root:
        raise Failure("ROOT is empty", Exit.USAGE, "`kvstore ls` shows the roots")
    roots = [r for r in daemon.call("ls")["roots"] if r["root"].startswith(root.lower())]
    if not roots:
        raise Failure(f"no root begins with {root}", Exit.NOT_FOUND, "`kvstore ls` shows the roots")
    if len(roots) > 1:
        raise Failure(f"{len(roots)} roots begin with {root}", Exit.USAGE, "give more digits")
    if not yes:
        click.confirm(f"Remove {counted(roots[0]['chunks'], 'chunk')} of {roots[0]['model']}?", abort=True, err=True)
    answer = daemon.call("purge", root=roots[0]["root"])
    output.document(root=roots[0]["root"], **{k: v for k, v in answer.items() if k != "root"})
    output.line(f"{counted(answer['removed'], 'chunk')} removed")
