"""`kvstore inspect KEY`: where a chunk is, and what happened to it."""

from __future__ import annotations

import click

from kvstore.cli.exit import Exit
from kvstore.cli.names import ROOT, key_of
from kvstore.cli.options import Daemon, daemon_command
from kvstore.cli.output import Output, duration
from kvstore.units import format_size


@daemon_command("inspect")
@click.argument("key")
@click.option("--root", metavar="HEX", help="Only under this root (the beginning of its name). Default: under all.")
@click.pass_context
def inspect(context: click.Context, output: Output, daemon: Daemon, key: str, root: str | None) -> None:
    """Show where a chunk is and what happened to it.

    KEY is 64 hexadecimal digits as `kvstore ls` shows them, or a name that `kvstore put` stored.
    Exit code 4 when it is not stored; its last events, such as an eviction, are shown even then.

    \b
    Examples:
      kvstore inspect notes.txt
      kvstore inspect 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    """
    digest, is_name = key_of(key)
    answer = daemon.call("inspect", key=digest.hex(), root=ROOT.hex() if is_name else root)
    found, events = answer["found"], answer.get("events", [])
    output.document(**{**answer, "key": digest.hex()})
    if not found:
        output.line(f"{key} is not stored")
    for number, chunk in enumerate(found):
        if number:
            output.line("")
        output.pairs(
            [("key", digest.hex()), *((name, _value(name, value)) for name, value in chunk.items() if name != "key")]
        )
    if events:
        output.line("")
        names = [name for name in events[0] if name != "root"]
        output.table(names, [[_value(name, event.get(name)) for name in names] for event in events])
    context.exit(Exit.OK if found else Exit.NOT_FOUND)


def _value(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) and name.endswith("_bytes"):
        return f"{format_size(value)} ({value:.0f} bytes)"
    if isinstance(value, (int, float)) and name in ("age_s", "ago_s"):
        return duration(value)
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None or value == "" else str(value)
