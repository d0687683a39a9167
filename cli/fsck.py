"""`kvstore fsck PATH`: read every record of a volume and verify it, while no daemon has it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import click

from kvstore.cli.exit import Exit, Failure
from kvstore.cli.options import command
from kvstore.cli.output import Output
from kvstore.config import Config
from kvstore.units import format_size


@command("fsck")
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option("--repair", is_flag=True, help="Remove damaged records and stale index entries.")
@click.pass_context
def fsck(context: click.Context, output: Output, path: Path | None, repair: bool) -> None:
    """Read and verify every record of the volume in PATH. The daemon must not be running.

    PATH defaults to the volume of the settings where there is one. Without --repair nothing is changed.
    Exit code 7 when damaged records were found.

    \b
    Examples:
      kvstore fsck /var/lib/kvstore/ssd
      kvstore fsck /mnt/nvme0/kvstore --repair
    """
    from kvstore.backends.ssd.fsck import check

    if path is None:
        paths = Config.load().ssd_paths
        if len(paths) != 1:
            raise Failure(f"the settings name {len(paths)} volumes", Exit.USAGE, "give the PATH of one")
        path = paths[0]
    if not path.is_dir():
        raise Failure(f"{path}: there is no such folder", Exit.NOT_FOUND, "give the folder of a volume")
    report = check(path, repair, _progress if sys.stderr.isatty() else None)
    fields = dataclasses.asdict(report)
    output.document(path=path, repaired=repair, **fields)
    output.pairs([(name.replace("_", " "), _value(name, value)) for name, value in fields.items()])
    context.exit(Exit.CORRUPTION if report.corrupt else Exit.OK)


def _progress(done: int, total: int) -> None:
    print(f"\rchecked {done} of {total}", end="\n" if done >= total else "", file=sys.stderr, flush=True)


def _value(name: str, value: object) -> str:
    return format_size(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
