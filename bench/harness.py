"""What all benchmarks share: flags, interleaved rounds, figures with targets, and the JSON line at the end.

Every figure is a ratio within one run, or a time: the median over rounds in which the compared things alternate, so
that what the machine does meanwhile hits them alike. Progress goes to stderr; the last line of stdout is JSON:
{"bench": NAME, "ok": bool, "figures": {NAME: {"value", "unit", "target", "ok"}}}. Exit status 1 on a missed target.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

NOISE_SHARE = 0.1
"""Above this share of the processors for others, figures are marked as doubtful."""


class Figure(TypedDict):
    value: float
    unit: str
    target: str | None
    ok: bool


class Report:
    """Collects figures and prints each as it comes (not with `quiet`)."""

    def __init__(self, bench: str, quiet: bool = False) -> None:
        self.bench = bench
        self.quiet = quiet
        self.figures: dict[str, Figure] = {}
        self._start_s = time.monotonic()
        self._start_busy_s, self._start_own_s = _machine_busy_s(), _own_busy_s()

    def say(self, text: str) -> None:
        if not self.quiet:
            print(f"[{time.monotonic() - self._start_s:6.1f} s] {text}", file=sys.stderr, flush=True)

    def add(
        self, name: str, value: float, unit: str, *, at_most: float | None = None, at_least: float | None = None
    ) -> None:
        """One figure; `ok` says whether it is within its bound, and is true without one."""
        ok = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        target = f"<= {at_most:g}" if at_most is not None else f">= {at_least:g}" if at_least is not None else None
        self.figures[name] = {"value": round(value, 4), "unit": unit, "target": target, "ok": ok}
        self.say(f"{name:28} {value:10.3f} {unit:8} {target or '':10} {'' if ok else 'MISSED'}")

    def others_share(self) -> float:
        """Share of all processors' time that went to other processes since the start (children count once ended)."""
        processors = os.cpu_count() or 1
        busy_s = _machine_busy_s() - self._start_busy_s - (_own_busy_s() - self._start_own_s)
        return max(0.0, busy_s / processors / (time.monotonic() - self._start_s))

    def finish(self, as_json: bool) -> int:
        """Print the table or the JSON line; returns the exit status."""
        others = self.others_share()
        if others > NOISE_SHARE:
            self.say(f"other processes took {others:.0%} of the processors meanwhile: repeat it on a quiet machine")
        ok = all(figure["ok"] for figure in self.figures.values())
        if as_json:
            print(json.dumps({"bench": self.bench, "ok": ok, "figures": self.figures}), flush=True)
        else:
            for name, figure in self.figures.items():
                verdict = "" if figure["target"] is None else "ok" if figure["ok"] else "MISSED"
                print(f"{name:28} {figure['value']:10.3f} {figure['unit']:8} {figure['target'] or '':10} {verdict}")
        return 0 if ok else 1


def _machine_busy_s() -> float:
    """Seconds that all processors were busy (user, nice, system) since boot."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def _own_busy_s() -> float:
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def parse_flags(description: str, **extra: Mapping[str, object]) -> argparse.Namespace:
    """--json, --quick, --folder, --only and a benchmark's own flags, given as {name: add_argument keywords}."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="the same figures with fewer rounds")
    parser.add_argument("--folder", type=Path, help="for the SSD volume and logs (default: a temporary folder)")
    parser.add_argument("--only", action="append", metavar="PART", help="run only this part (may be repeated)")
    for name, keywords in extra.items():
        parser.add_argument("--" + name.replace("_", "-"), **keywords)  # type: ignore[arg-type]
    return parser.parse_args()


def run_parts(
    bench: str, flags: argparse.Namespace, parts: Mapping[str, Callable[[Report, argparse.Namespace, Path], None]]
) -> int:
    """Run the parts of one benchmark, one after another, each in a folder of its own; returns the exit status."""
    report = Report(bench)
    unknown = set(flags.only or ()) - set(parts)
    if unknown:
        sys.exit(f"no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    for name, part in parts.items():
        if flags.only and name not in flags.only:
            continue
        report.say(f"-- {name}")
        with scratch(flags.folder) as folder:
            part(report, flags, folder)
    return report.finish(flags.json)


@contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    """A folder that is removed at the end, below `parent` or the system's temporary folder."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def interleave(rounds: int, steps: Mapping[str, Callable[[int], float]], warm_up: int = 2) -> dict[str, list[float]]:
    """Call every step once a round, in an order that turns by one each round; a step returns its own seconds.

    The first `warm_up` rounds are done and dropped.
    """
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + warm_up):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken_s = steps[name](number)
            if number >= warm_up:
                seconds[name].append(taken_s)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over rounds of above/below: pairs of one round saw the same machine."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
