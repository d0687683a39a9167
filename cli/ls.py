"""`kvstore ls`: the roots that have chunks, or the chunks of one."""

from __future__ import annotations

from typing import Any

import click

from kvstore.cli.exit import Exit, Failure
from kvstore.cli.options import Daemon, daemon_command
from kvstore.cli.output import Output
from kvstore.units import format_size

PAGE = 500
"""Chunks a request: the daemon gives no more."""


@daemon_command("ls")
@click.argument("root", required=False)
@click.option(
    "-n", "--limit", default=1000, show_default=True, type=click.IntRange(min=0), help="Chunks; 0 = all of them."
)
def ls(output: Output, daemon: Daemon, root: str | None, limit: int) -> None:
    """List roots, or the chunks of one.

    A root is a model with a request identity. ROOT is the beginning of a root's hexadecimal name.

    \b
    Examples:
      kvstore ls
      kvstore ls 3fa9
      kvstore ls 3fa9 --json | jq -r '.chunks[].key'
    """
    if root == "":
        raise Failure("ROOT is empty", Exit.USAGE, "leave it out to list the roots")
    if root is None:
        answer = daemon.call("ls")
        output.document(**answer)
        rows = [[r["root"][:16], str(r["model"]), str(r["chunks"])] for r in answer["roots"]]
        if rows:
            output.table(["root", "model", "chunks"], rows, right=["chunks"])
        else:
            output.line("nothing is stored")
        if answer["total"] > len(rows):
            output.line(f"... the {len(rows)} largest of {answer['total']} roots", "yellow")
        return
    chunks: list[dict[str, Any]] = []
    cursor: int | None = None
    while True:
        want = min(PAGE, limit - len(chunks)) if limit else PAGE
        answer = daemon.call("ls", root=root, cursor=cursor or 0, limit=want)
        chunks += answer["chunks"]
        cursor = answer.get("cursor")
        if cursor is None or (limit and len(chunks) >= limit):
            break
    output.document(root=root, chunks=chunks, complete=cursor is None)
    rows = [
        [c["key"], str(c["pool"]), _tiers(c["tiers"]), format_size(c["size_bytes"]), (c["parent"] or "-")[:16]]
        for c in chunks
    ]
    output.table(["key", "pool", "tiers", "size", "parent"], rows, right=["size"])
    if cursor is not None:
        output.line(f"... and more: use --limit {limit * 10} or --limit 0", "yellow")


def _tiers(tiers: object) -> str:
    return "+".join(map(str, tiers)) if isinstance(tiers, (list, tuple)) else str(tiers)
