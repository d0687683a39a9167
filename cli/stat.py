"""`kvstore stat`: counters, or what they do every second."""

from __future__ import annotations

import time

import click

from kvstore.cli.options import Daemon, daemon_command
from kvstore.cli.output import Output
from kvstore.units import format_size

Counters = dict[str, dict[str, float]]


@daemon_command("stat")
@click.option(
    "-i", "--interval", metavar="SECONDS", type=click.FloatRange(0.1, 3600), help="Show rates, again and again."
)
@click.option("-n", "--count", metavar="N", type=click.IntRange(min=1), help="Stop after N intervals.")
def stat(output: Output, daemon: Daemon, interval: float | None, count: int | None) -> None:
    """Show counters, or rates with -i.

    Counters count from the daemon's start. With -i only what changed in an interval is shown, a second at a time.

    \b
    Examples:
      kvstore stat
      kvstore stat -i 1
      kvstore stat -i 5 -n 12 --json      one document a line
    """
    if interval is None:
        counters = _counters(daemon)
        output.document(counters=counters)
        rows = [[_name(name, label), _number(name, value)] for name, label, value in _flat(counters)]
        output.table(["counter", "total"], rows, right=["total"])
        return
    before, before_s = _counters(daemon), time.monotonic()
    done = 0
    while count is None or done < count:
        time.sleep(interval)
        now, now_s = _counters(daemon), time.monotonic()
        _show_rates(output, before, now, now_s - before_s)
        before, before_s = now, now_s
        done += 1


def _show_rates(output: Output, before: Counters, now: Counters, seconds: float) -> None:
    """One block an interval: only what moved, so that a quiet daemon prints one line."""
    rates: Counters = {}
    for name, label, value in _flat(now):
        moved = value - before.get(name, {}).get(label, 0)
        if moved:
            rates.setdefault(name, {})[label] = moved / seconds
    output.document(interval_s=round(seconds, 3), rates_per_s=rates)
    words = [f"{_name(name, label)} {_number(name, rate)}/s" for name, label, rate in _flat(rates)]
    output.line(f"{time.strftime('%H:%M:%S')}  {'  '.join(words) or 'idle'}")


def _counters(daemon: Daemon) -> Counters:
    answer = daemon.call("stat")
    counters: Counters = answer.get("counters", answer)
    return counters


def _flat(counters: Counters) -> list[tuple[str, str, float]]:
    return [
        (name, label, value) for name, labels in sorted(counters.items()) for label, value in sorted(labels.items())
    ]


def _name(name: str, label: str) -> str:
    return f"{name}{{{label}}}" if label else name


def _number(name: str, value: float) -> str:
    return format_size(value) if "bytes" in name else f"{value:.10g}" if value == int(value) else f"{value:.3g}"
