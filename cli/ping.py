"""`kvstore ping`: is a daemon there, and how fast does it answer?"""

from __future__ import annotations

import statistics
import time

import click

from kvstore.cli.options import Daemon, daemon_command
from kvstore.cli.output import Output
from kvstore.wire.messages import Ping


@daemon_command("ping")
@click.option("-c", "--count", default=5, show_default=True, type=click.IntRange(1, 100_000), help="Round trips.")
@click.option(
    "--timeout", "timeout_s", metavar="SECONDS", default=10.0, show_default=True, type=click.FloatRange(0.001, 3600),
    help="Longest silence of the daemon.",
)  # fmt: skip
def ping(output: Output, daemon: Daemon, count: int, timeout_s: float) -> None:
    """Measure a round trip to the daemon.

    Connects as an engine does: it needs no permission for the admin socket.

    \b
    Examples:
      kvstore ping
      kvstore ping -c 1 --timeout 1            for a health check
      kvstore ping --json | jq .median_us
    """
    times_us = []
    with daemon.connect_data(timeout_s) as connection:
        welcome = connection.hello("kvstore ping")
        for _ in range(count):
            start_s = time.perf_counter()
            connection.ask(Ping())
            times_us.append((time.perf_counter() - start_s) * 1e6)
    output.document(
        socket=daemon.socket_path, version=welcome.version, protocol=welcome.protocol, count=count,
        median_us=round(statistics.median(times_us), 1), max_us=round(max(times_us), 1),
    )  # fmt: skip
    output.line(
        f"kvstore {welcome.version} (protocol {welcome.protocol}) answers on {daemon.socket_path}:"
        f" median {statistics.median(times_us):.0f} us, worst {max(times_us):.0f} us of {count}"
    )
