"""`kvstore serve`: run the daemon in the foreground, for systemd, a container or a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvstore.cli.options import CONFIG_OPTION, setting_options
from kvstore.config import Config


@click.command("serve")
@CONFIG_OPTION
@setting_options
def serve(config_path: Path | None, flags: dict[str, Any]) -> None:
    """Run the daemon. It works without any setting.

    Settings come from flags, environment (KVSTORE_ARENA_SIZE), TOML file and defaults, in this order; see
    `kvstore config show --origin`. SIGTERM writes what is only in memory to SSD and stops; SIGHUP reads the settings
    again.

    \b
    Examples:
      kvstore serve
      kvstore serve --arena-size 64GiB --ssd-paths /mnt/nvme0/kvstore --ssd-size 1TiB
      kvstore serve --ssd-paths none                  memory only
    """
    from kvstore.daemon import serve as run

    run(lambda: Config.load(config_path, flags=flags))
