"""`kvstore rm KEY`: remove a chunk, or everything that `put` stored under a name, from every tier."""

from __future__ import annotations

import click

from kvstore.cli.exit import Exit, Failure
from kvstore.cli.files import open_root, read_head
from kvstore.cli.names import ROOT, Head, all_keys, key_of
from kvstore.cli.options import Daemon, daemon_command
from kvstore.cli.output import Output, counted


@daemon_command("rm")
@click.argument("key")
@click.option("--root", metavar="HEX", help="Only under this root (the beginning of its name). Default: under all.")
def rm(output: Output, daemon: Daemon, key: str, root: str | None) -> None:
    """Remove a chunk, or a file that was put.

    It goes from memory and SSD and does not come back after a crash.

    KEY is 64 hexadecimal digits as `kvstore ls` shows them, or a name that `kvstore put` stored.

    \b
    Examples:
      kvstore rm notes.txt
      kvstore rm --root 3fa9 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    """
    digest, is_name = key_of(key)
    if is_name:
        with open_root(daemon, "kvstore rm") as files:
            head = read_head(daemon, files, key)
        removed = remove_file(daemon, key, head) if head is not None else 0
    else:
        removed = _remove(daemon, digest, root)
    if not removed:
        raise Failure(f"{key} is not stored", Exit.NOT_FOUND, "`kvstore ls` shows what is")
    output.document(key=key, removed=removed)
    output.line(f"{counted(removed, 'chunk')} removed")


def remove_file(daemon: Daemon, name: str, head: Head) -> int:
    """Chunks removed, last first: after an interruption the head still finds the rest."""
    return sum(_remove(daemon, key, ROOT.hex()) for key in reversed(all_keys(name, head)))


def _remove(daemon: Daemon, key: bytes, root: str | None) -> int:
    if root == "":
        raise Failure("--root is empty", Exit.USAGE, "leave it out to remove the key under all roots")
    return int(daemon.call("rm", key=key.hex(), root=root)["removed"])
