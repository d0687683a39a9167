"""`kvstore put NAME [FILE]`: store a file of any size."""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import ExitStack
from typing import BinaryIO, cast

import click

from kvstore.cli.exit import Exit, Failure
from kvstore.cli.files import digest_of, open_root, read_head, store
from kvstore.cli.names import CHUNK_BYTES
from kvstore.cli.options import Daemon, daemon_command
from kvstore.cli.output import Output, counted
from kvstore.cli.rm import remove_file
from kvstore.codes import Ack
from kvstore.units import MiB, format_size

SPOOL_BYTES = 64 * MiB
"""A pipe is kept in memory up to this size, else in a temporary file: its digest is needed before its first byte."""
_WORDS = {
    Ack.EXISTS: "was stored already",
    Ack.STORED_SSD: "on SSD, synced",
    Ack.STORED_WRITE_BEHIND: "in memory, being written to SSD",
    Ack.STORED_DRAM: "in memory only",
}


@daemon_command("put")
@click.argument("name")
@click.argument("file", default="-", type=click.Path(allow_dash=True, dir_okay=False))
@click.option("--durable", is_flag=True, help="Return when it is synced to SSD.")
@click.option("--replace", is_flag=True, help="Remove what is stored under NAME with other content first.")
def put(output: Output, daemon: Daemon, name: str, file: str, durable: bool, replace: bool) -> None:
    """Store a file under a name.

    FILE is standard input where it is not given or `-`. It is stored in chunks of 1 MiB. This is a cache: what you put
    may be evicted. Keep the original.

    \b
    Examples:
      kvstore put notes.txt notes.txt
      tar c src | kvstore put src.tar
      kvstore put --durable model.json - < model.json
    """
    with ExitStack() as stack:
        root = stack.enter_context(open_root(daemon, "kvstore put"))
        stream = stack.enter_context(_seekable(file))
        head = digest_of(stream)
        there = read_head(daemon, root, name)
        if there is not None and there != head:
            if not replace:
                raise Failure(f"{name} is stored with other content", Exit.ERROR, "use --replace or another name")
            remove_file(daemon, name, there)
        answer = store(root, name, head, stream, durable)
        if answer is Ack.EXISTS and there is None and read_head(daemon, root, name) != head:
            raise Failure(f"{name} was stored by somebody else at the same time", Exit.ERROR, "use --replace")
    output.document(
        name=name,
        length_bytes=head.length_bytes,
        chunks=head.chunks,
        sha256=head.digest.hex(),
        result=answer.name.lower(),
    )
    chunks = f"{counted(head.chunks, 'chunk')} of {format_size(CHUNK_BYTES)}"
    output.line(f"{name}: {format_size(head.length_bytes)} in {chunks}, {_WORDS[answer]}")


def _seekable(file: str) -> BinaryIO:
    """FILE opened, or standard input copied where it cannot be read twice. The caller closes it."""
    if file != "-":
        return open(file, "rb")
    if sys.stdin.isatty():
        raise click.UsageError("give a FILE, or pipe something into this command")
    spool = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115
    shutil.copyfileobj(sys.stdin.buffer, spool, MiB)
    spool.seek(0)
    return cast(BinaryIO, spool)
