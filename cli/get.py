"""`kvstore get NAME [FILE]`: the inverse of `put`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from kvstore.cli.files import fetch, not_stored, open_root, read_head
from kvstore.cli.options import Daemon, daemon_command
from kvstore.cli.output import Output, say
from kvstore.units import format_size


@daemon_command("get")
@click.argument("name")
@click.argument("file", default="-", type=click.Path(allow_dash=True, dir_okay=False))
def get(output: Output, daemon: Daemon, name: str, file: str) -> None:
    """Get back what was put under a name.

    Written to FILE, or to standard output, and checked against its digest.

    Exit code 4 when it is not stored or a part was evicted, 7 when its bytes are damaged. FILE is replaced as a whole
    or not at all.

    \b
    Examples:
      kvstore get notes.txt notes.txt
      kvstore get src.tar | tar x
    """
    if file == "-" and output.as_json:
        raise click.UsageError("--json needs a FILE: standard output would hold both")
    with open_root(daemon, "kvstore get") as root:
        head = read_head(daemon, root, name)
        if head is None:
            raise not_stored(daemon, name)
        if file == "-":
            fetch(daemon, root, name, head, sys.stdout.buffer.write)
            sys.stdout.buffer.flush()
            return
        target = Path(file)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                fetch(daemon, root, name, head, stream.write)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    output.document(name=name, file=file, length_bytes=head.length_bytes, sha256=head.digest.hex())
    if not output.as_json:
        say(f"{file}: {format_size(head.length_bytes)}")


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
