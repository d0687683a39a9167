"""`kvstore config`: show and check settings without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvstore.cli.config_table import document
from kvstore.cli.options import CONFIG_OPTION, command, daemon_of, setting_options, shown
from kvstore.cli.output import Output
from kvstore.config import SETTINGS, Config, is_socket
from kvstore.host import arena_bytes, read_memory, volume_bytes
from kvstore.units import format_size


@click.group("config")
def config() -> None:
    """Show and check settings."""


@command("show")
@CONFIG_OPTION
@setting_options
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@click.option("--running", is_flag=True, help="Ask the running daemon for what it uses.")
def show(output: Output, config_path: Path | None, flags: dict[str, Any], origin: bool, running: bool) -> None:
    """Show settings and where they come from.

    They are what `kvstore serve` would use with the same flags and environment.

    \b
    Examples:
      kvstore config show --origin
      KVSTORE_ARENA_SIZE=8GiB kvstore config show --json
      kvstore config show --running
    """
    loaded = Config.load(config_path, flags=flags)
    if running:
        answer = daemon_of(loaded).call("config")
        output.document(**answer)
        output.pairs(
            [(name, shown(SETTINGS[name], value)) for name, value in answer["settings"].items() if name in SETTINGS]
        )
        return
    rows = [(row, shown(row, loaded.value(row.name))) for row in SETTINGS.values()]
    output.document(
        file=loaded.file,
        settings={row.name: {"value": text, "origin": loaded.origin(row.name)} for row, text in rows},
    )
    if origin:
        output.table(["setting", "value", "origin"], [[r.name, text, loaded.origin(r.name)] for r, text in rows])
    else:
        output.pairs([(row.name, text) for row, text in rows])


@command("check")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@setting_options
def check(output: Output, file: Path | None, flags: dict[str, Any]) -> None:
    """Check a file of settings.

    Of FILE, or of the default one, also whether it fits this machine. While a daemon runs, its memory is taken: then
    the arena's size is not checked.

    Exit code 2, with one sentence that names the setting, when they do not. Use it before `systemctl reload`.

    \b
    Examples:
      kvstore config check /etc/kvstore/kvstore.toml
    """
    loaded = Config.load(file, flags=flags)
    memory, running = read_memory(), is_socket(loaded.socket_path)
    arena = None if running else arena_bytes(loaded.arena_size, loaded.arena_huge_pages, memory)
    volumes = {str(path): volume_bytes(loaded.ssd_size, path) for path in loaded.ssd_paths}
    output.document(
        file=loaded.file, arena_bytes=arena, available_bytes=memory.available_bytes, limited_by=memory.limited_by,
        volumes=volumes,
    )  # fmt: skip
    output.line(f"ok: {loaded.file or 'no file, only defaults and environment'}", "green")
    free = f"{format_size(memory.available_bytes)} free ({memory.limited_by})"
    output.pairs(
        [
            ("arena", "not checked, for a daemon is running" if arena is None else f"{format_size(arena)} of {free}"),
            *(("volume", f"{path}: at most {format_size(size)}") for path, size in volumes.items()),
        ]
    )


@command("table")
def table(output: Output) -> None:
    """Print docs/configuration.md.

    Made from the table of settings that the program uses.
    """
    rows = [
        {"name": r.name, "variable": r.variable, "flag": r.flag, "unit": r.unit, "range": r.range, "reason": r.reason,
         "reload": r.reload}
        for r in SETTINGS.values()
    ]  # fmt: skip
    output.document(settings=rows)
    if not output.as_json:
        click.echo(document(), nl=False)


for _command in (show, check, table):
    config.add_command(_command)
