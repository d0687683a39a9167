"""The text of docs/configuration.md, made from the table of settings so that it cannot differ from the program."""

# ruff: noqa: E501
from __future__ import annotations

from kvstore.cli.options import shown
from kvstore.config import SETTINGS
from kvstore.settings import REQUIRED, Setting

_HEAD = """\
# Configuration

`kvstore serve` works without any. This page is printed by `kvstore config table`; do not edit it.

## Where a value comes from
Flag, then environment, then TOML file, then default: the first that has it wins. `kvstore config show --origin` says
which did. An unknown name is an error that names the nearest valid one; nothing is ignored silently.

| source | written like |
|---|---|
| flag | `kvstore serve --arena-size 8GiB --ssd-paths /mnt/nvme0 --ssd-paths /mnt/nvme1` |
| environment | `KVSTORE_ARENA_SIZE=8GiB KVSTORE_SSD_PATHS=/mnt/nvme0:/mnt/nvme1` |
| file | `--config FILE`, else `$KVSTORE_CONFIG`, else `~/.config/kvstore/kvstore.toml`, else `/etc/kvstore/kvstore.toml` |

```toml
[arena]
size = "64GiB"

[ssd]
paths = ["/mnt/nvme0/kvstore", "/mnt/nvme1/kvstore"]
size = "1TiB"

[socket]
group = "engines"
```

## Folders
| what | first of these that applies |
|---|---|
| runtime folder (sockets) | `$RUNTIME_DIRECTORY` (systemd), `$XDG_RUNTIME_DIR/kvstore` where that exists, root: `/run/kvstore`, others: `kvstore-UID` (mode 0700) in the temporary folder |
| state folder (volume) | `$STATE_DIRECTORY` (systemd), `$XDG_STATE_HOME/kvstore`, root: `/var/lib/kvstore`, others: `~/.local/state/kvstore`, without a home `/var/tmp/kvstore-UID` |

Clients that are given no path take `$KVSTORE_SOCKET_PATH`, else the first runtime folder that has a socket.

## Values
Sizes: `64GiB`, `512MiB`, `1.5GB`, `4096` (bytes), where said also `30%`. They are rounded down to what can be used: to
2 MiB for the arena, to 64 MiB for volumes. Times: seconds, `30` or `30s`.
An arena that does not fit into free memory, or into what is left of the memory cgroup, is refused at start with the
numbers; so is a volume that cannot be opened.

## Changing it while the daemon runs
`systemctl reload kvstore`, `kvstore reload` or SIGHUP read everything again. If there is an error, all old settings stay
and the log (or `kvstore reload`) says why. Settings without a mark in the last column need a restart; a reload names
those that differ.

## Settings
| name | environment | default | unit | allowed | why | reload |
|---|---|---|---|---|---|---|
"""


def document() -> str:
    return _HEAD + "".join(map(_row, SETTINGS.values()))


def _row(row: Setting) -> str:
    cells = [
        f"`{row.name}`", f"`{row.variable}`", _default(row), row.unit, row.range, row.reason, "yes" if row.reload else "",
    ]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(row: Setting) -> str:
    if row.default is REQUIRED:
        return "see folders"
    return "none" if row.default is None else f"`{shown(row, row.default)}`"
