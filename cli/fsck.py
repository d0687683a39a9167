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
    """Verify a volume while no daemon has it.

    Every record is read and compared with its checksums. PATH defaults to the volume of the settings where there is
    one. Without --repair nothing is changed.
    Exit code 7 when damaged records were found, 5 when something else is not right (a lost index, unreadable parts).

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
    report = check(path, repair, _progress)
    output.document(path=path, clean=report.clean, **dataclasses.asdict(report))
    output.line(f"{path}: {'clean' if report.clean else 'not clean'}", "green" if report.clean else "red")
    output.pairs([(name.replace("_", " "), str(getattr(report, name))) for name in _NUMBERS])
    for note in report.notes:
        output.line(note, "yellow")
    if report.corrupt and not repair:
        output.line("run it with --repair to remove the damaged records")
    context.exit(Exit.CORRUPTION if report.corrupt else Exit.OK if report.clean else Exit.DEGRADED)


_NUMBERS = (
    "records",
    "ok",
    "corrupt",
    "dropped",
    "orphan_slots",
    "stale_index",
    "leftovers",
    "unreadable",
    "index_lost",
    "repaired",
)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        text = f"checked {format_size(done)} of {format_size(total)}"
        print(f"\r{text}   ", end="\n" if done >= total else "", file=sys.stderr, flush=True)
