"""`kvstore status`: what the daemon holds and how it does, on one screen."""

from __future__ import annotations

from typing import Any

import click

from kvstore.cli.exit import Exit
from kvstore.cli.options import Daemon, daemon_command
from kvstore.cli.output import Output, counted, duration
from kvstore.units import format_size


@daemon_command("status")
@click.pass_context
def status(context: click.Context, output: Output, daemon: Daemon) -> None:
    """Show health, arena, volumes and sessions.

    Exit code 5 when the daemon is degraded: a volume is read-only, lost or full, for example; the reason is shown.

    \b
    Examples:
      kvstore status
      kvstore status --json | jq .dram.used_bytes
    """
    answer = daemon.call("status")
    output.document(socket=daemon.socket_path, **answer)
    if not output.as_json:
        _show(output, daemon, answer)
    context.exit(Exit.OK if answer["health"] == "ok" else Exit.DEGRADED)


def _show(output: Output, daemon: Daemon, answer: dict[str, Any]) -> None:
    healthy = answer["health"] == "ok"
    output.line(
        f"kvstore {answer['version']} on {daemon.socket_path}: {answer['health']}, up {duration(answer['uptime_s'])}",
        "bold green" if healthy else "bold red",
    )
    for reason in answer.get("reasons", []):
        output.line(f"  {reason}", "red")
    arena, dram, queues = answer["arena"], answer["dram"], answer.get("queues", {})
    share = arena["used_bytes"] / arena["size_bytes"] if arena["size_bytes"] else 0
    dirty, pinned = format_size(dram.get("dirty_bytes", 0)), format_size(dram.get("pinned_bytes", 0))
    output.pairs(
        [
            ("arena", f"{format_size(arena['used_bytes'])} of {format_size(arena['size_bytes'])} used ({share:.0%}),"
                      f" pages: {arena['page_kind']}"),
            ("dram", f"{counted(dram['chunks'], 'chunk')}, {format_size(dram['bytes'])};"
                     f" not yet on SSD {dirty}, pinned {pinned}"),
            ("stored", f"{counted(answer['chunks'], 'chunk')} of {counted(answer['roots'], 'root')}"),
            ("queues", ", ".join(f"{name} {length}" for name, length in queues.items()) or "-"),
        ]
    )  # fmt: skip
    for note in arena.get("notes", []):
        output.line(f"  {note}", "yellow")
    _show_volumes(output, answer.get("ssd", []))
    sessions = answer.get("sessions", [])
    output.line("")
    if not sessions:
        output.line("no engine is connected")
        return
    numbers = ["leases", "reservations", "holds"]
    rows = [
        [
            s["id"][:12], s["label"] or "-", "yes" if s["connected"] else "no",
            str(s["leases"]), str(s["reservations"]), format_size(s["held_bytes"]),
        ]
        for s in sessions
    ]  # fmt: skip
    output.table(["session", "label", "connected", *numbers], rows, right=numbers)


def _show_volumes(output: Output, volumes: list[dict[str, Any]]) -> None:
    output.line("")
    if not volumes:
        output.line("no SSD volume: chunks live in memory only")
        return
    numbers = ["used", "cap", "free on disk", "chunks"]
    rows = [
        [
            v["path"], format_size(v["used_bytes"]), format_size(v["size_bytes"]), format_size(v["free_bytes"]),
            str(v["chunks"]), v["state"], "direct" if v["direct"] else "buffered",
        ]
        for v in volumes
    ]  # fmt: skip
    output.table(["volume", *numbers, "state", "I/O"], rows, right=numbers)
    for volume in volumes:
        for note in volume.get("notes", []):
            output.line(f"  {volume['path']}: {note}", "yellow")
