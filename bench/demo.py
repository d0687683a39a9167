"""The demonstration: a real trace, a real daemon, two engine processes, one crash, and every byte verified.

`make demo`, or `python -m bench.demo --requests 2000 --bytes-per-token 1KiB`. Ends with a table and one line of JSON.
Exit status 1 where a byte was wrong or nothing survived the crash.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.demo_engine import RECONNECT_S, Tally, demo_namespace, engine_main
from bench.harness import Report, scratch
from bench.serving import unit_nice
from bench.trace import MOONCAKE, TOKENS_PER_BLOCK, Request, load_requests
from kvstore.client import Client
from kvstore.testing.daemon import DaemonProcess
from kvstore.units import GiB, format_size, parse_size

ENGINES = 2


def main() -> int:
    flags = _flags()
    console = Console(stderr=True)
    requests = load_requests(flags.requests, flags.trace)
    chunk_bytes = flags.bytes_per_token * TOKENS_PER_BLOCK
    with scratch(flags.folder) as folder:
        ssd_bytes = min(flags.ssd_size, shutil.disk_usage(folder).free // 2)
        blocks = sum(len(request.keys) for request in requests)
        console.print(
            f"{len(requests)} requests of {flags.trace.name.partition('.')[0]}: {blocks} blocks of "
            f"{TOKENS_PER_BLOCK} tokens, "
            f"{format_size(chunk_bytes)} each; arena {format_size(flags.arena_size)}, SSD {format_size(ssd_bytes)}"
        )
        daemon = DaemonProcess(folder, arena_bytes=flags.arena_size, ssd_bytes=ssd_bytes, nice=unit_nice())
        start_s = time.monotonic()
        with daemon:
            total, crash = _replay(daemon, requests, chunk_bytes, console)
        taken_s = time.monotonic() - start_s
    _print_table(total, crash, requests, taken_s)
    return _finish(total, crash)


class Crash:
    """What the kill half-way did."""

    known_chunks = 0
    survived_chunks = 0
    restart_s = 0.0


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2500, help="how many of the trace (default %(default)s)")
    parser.add_argument("--bytes-per-token", type=parse_size, default=512, help="KV bytes of one token (default 512)")
    parser.add_argument("--arena-size", type=parse_size, default=GiB, help="shared memory (default 1GiB)")
    parser.add_argument("--ssd-size", type=parse_size, default=8 * GiB, help="cap of the SSD volume (default 8GiB)")
    parser.add_argument("--folder", type=Path, help="for the SSD volume (default: a temporary folder)")
    parser.add_argument("--trace", type=Path, default=MOONCAKE, help="an xz-compressed trace (default: Mooncake's)")
    flags = parser.parse_args()
    if flags.requests < ENGINES or flags.bytes_per_token < 8:
        parser.error(f"at least {ENGINES} requests and 8 bytes a token are needed")
    return flags


def _replay(
    daemon: DaemonProcess, requests: Sequence[Request], chunk_bytes: int, console: Console
) -> tuple[Tally, Crash]:
    """Two engines take the requests in turns; half-way the daemon is killed and started again under them."""
    context = multiprocessing.get_context("spawn")
    go = context.Event()
    go.set()
    total, crash = Tally(), Crash()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    engines, ends = [], []
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        task = progress.add_task("replaying", total=len(requests), state="")
        try:
            for number in range(ENGINES):
                here, there = context.Pipe(duplex=False)
                share = requests[number::ENGINES]
                arguments = (daemon.socket_path, share, chunk_bytes, f"engine {number}", go, there)
                engines.append(context.Process(target=engine_main, args=arguments, daemon=True))
                engines[-1].start()
                there.close()
                ends.append(here)
            for tally in _received(ends):
                total.add(tally)
                progress.update(task, completed=total.requests, state=_state(total))
                if crash.restart_s == 0 and total.requests >= len(requests) // 2:
                    go.clear()
                    daemon.kill()
                    progress.console.print(f"request {total.requests}: SIGKILL to the daemon (pid {daemon.pid})")
                    _restart(daemon, requests, chunk_bytes, set(total.kept), crash)
                    progress.console.print(
                        f"serving again after {crash.restart_s:.2f} s: {crash.survived_chunks} of "
                        f"{crash.known_chunks} chunks survived"
                    )
                    go.set()
        finally:
            for engine in engines:
                if sys.exc_info()[0] is not None:
                    engine.terminate()
                engine.join()
    failed = [engine.exitcode for engine in engines if engine.exitcode]
    if failed:
        sys.exit(f"an engine process ended with {failed[0]}; the daemon said:\n{daemon.log_tail()}")
    return total, crash


def _received(ends: list[Connection]) -> Iterator[Tally]:
    """All tallies in the order of their coming, until each engine has said None or ended."""
    while ends:
        for end in wait(ends):
            assert isinstance(end, Connection)
            try:
                tally = end.recv()
            except EOFError:
                tally = None
            if tally is None:
                end.close()
                ends.remove(end)
            else:
                yield tally


def _restart(
    daemon: DaemonProcess, requests: Sequence[Request], chunk_bytes: int, known: set[bytes], crash: Crash
) -> None:
    """Start the killed daemon again and ask for everything that was acknowledged or served before."""
    start_s = time.monotonic()
    daemon.start()
    crash.restart_s = time.monotonic() - start_s
    found: set[bytes] = set()
    with Client(daemon.socket_path, label="after the crash", deadline_s=RECONNECT_S) as client:
        client.wait_connected(RECONNECT_S)
        root = client.root(demo_namespace(chunk_bytes))
        for request in requests:
            if request.keys[0] in known:
                found.update(request.keys[: root.batch_exists(request.keys)])
    crash.known_chunks = len(known)
    crash.survived_chunks = len(found & known)


def _state(total: Tally) -> str:
    reused = total.hit_tokens / max(1, total.tokens)
    return f"{reused:.0%} of tokens reused, {total.verified_chunks} chunks verified, {total.wrong_bytes} bytes wrong"


def _best_tokens(requests: Sequence[Request]) -> int:
    """Tokens that an unbounded cache which loses nothing would have served, requests one after another."""
    seen: set[bytes] = set()
    tokens = 0
    for request in requests:
        run = next((i for i, key in enumerate(request.keys) if key not in seen), len(request.keys))
        tokens += min(request.input_tokens, run * TOKENS_PER_BLOCK)
        seen.update(request.keys)
    return tokens


def _print_table(total: Tally, crash: Crash, requests: Sequence[Request], taken_s: float) -> None:
    table = Table(title="kvstore demonstration", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    best = _best_tokens(requests)
    table.add_row("requests replayed", f"{total.requests} by {ENGINES} engine processes in {taken_s:.1f} s")
    table.add_row(
        "tokens reused",
        f"{total.hit_tokens:,} of {total.tokens:,} ({total.hit_tokens / total.tokens:.1%}); "
        f"an endless cache without a crash: {best / total.tokens:.1%}",
    )
    table.add_row("chunks served from DRAM", f"{total.hits['DRAM']:,}")
    table.add_row("chunks served from SSD", f"{total.hits['SSD']:,}")
    table.add_row("chunks stored", f"{total.stored:,}")
    if total.lost:
        table.add_row("refused or missed", ", ".join(f"{why}: {count:,}" for why, count in total.lost.most_common()))
    for what, seconds in sorted(total.moved_s.items()):
        mean_bytes = total.moved_bytes[what] / total.moves[what]
        table.add_row(what, f"{total.moved_bytes[what] / seconds / 1e9:.2f} GB/s, {format_size(mean_bytes)} a call")
    table.add_row(
        "SIGKILL half-way",
        f"{crash.survived_chunks:,} of {crash.known_chunks:,} chunks survived (the rest was on its way to SSD); "
        f"serving again after {crash.restart_s:.2f} s",
    )
    table.add_row("chunks verified byte by byte", f"{total.verified_chunks:,}")
    table.add_row("wrong bytes", f"[bold {'red' if total.wrong_bytes else 'green'}]{total.wrong_bytes}[/]")
    console = Console()
    console.print(table)
    console.print(f"wrong bytes: {total.wrong_bytes}", highlight=False)


def _finish(total: Tally, crash: Crash) -> int:
    report = Report("demo", quiet=True)
    report.add("wrong_bytes", total.wrong_bytes, "bytes", at_most=0)
    report.add("verified_chunks", total.verified_chunks, "chunks", at_least=1)
    report.add("hit_tokens", total.hit_tokens, "tokens")
    report.add("survived_chunks", crash.survived_chunks, "chunks", at_least=1)
    report.add("dram_hits", total.hits["DRAM"], "chunks")
    report.add("ssd_hits", total.hits["SSD"], "chunks")
    return report.finish(as_json=True)


if __name__ == "__main__":
    sys.exit(main())
