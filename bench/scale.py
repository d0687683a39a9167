"""Many small chunks: is a look-up as fast with 200 000 chunks as with 10 000, what memory does each take, how long does
a restart after a kill last? Real chunks of 4 KiB through the socket, in chains of 1 000, all on SSD. `--full`: to 1 M.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from bench.harness import Report, interleave, parse_flags, ratio, run_parts
from bench.memory import Bytes, Rotation, private_memory
from bench.serving import Store, connected, new_keys, serving
from kvstore.cli.connection import Connection
from kvstore.client import Root
from kvstore.testing.daemon import DaemonProcess
from kvstore.units import GiB, KiB, MiB, round_up

CHUNK_BYTES = 4 * KiB
CHAIN = 1000
SCALES = (10_000, 50_000, 200_000)
FULL_SCALES = (*SCALES, 500_000, 1_000_000)
ROOM = 1.3
"""Arena and volume over what the chunks take."""
BACK_OFF_S = 0.02


def scale(report: Report, flags: argparse.Namespace, folder: Path) -> None:
    scales = FULL_SCALES if flags.full else SCALES
    most = scales[-1]
    arena_bytes = round_up(int(most * CHUNK_BYTES * ROOM), 64 * MiB)
    ssd_bytes = round_up(int(most * 2 * CHUNK_BYTES * ROOM), 64 * MiB) + GiB
    buffers = Rotation.over(private_memory(CHAIN * CHUNK_BYTES), CHUNK_BYTES).pieces
    chains: list[list[bytes]] = []
    growth, rss_bytes = [], []
    with (
        serving(folder / "few", CHUNK_BYTES, arena_bytes=256 * MiB, ssd_bytes=GiB) as few,
        serving(folder / "many", CHUNK_BYTES, arena_bytes=arena_bytes, ssd_bytes=ssd_bytes) as store,
    ):
        few_chains = [_stored_chain(few.root, buffers) for _ in range(scales[0] // CHAIN)]
        for chunks in scales:
            start_s, before = time.monotonic(), len(chains)
            while len(chains) * CHAIN < chunks:
                chains.append(_stored_chain(store.root, buffers))
            _flush(store.daemon)
            taken_s = time.monotonic() - start_s
            lookup_s = interleave(
                300 if flags.quick else 2000,
                {
                    "few": lambda i: _lookup_s(few.root, few_chains[i * 7919 % len(few_chains)]),
                    "many": lambda i: _lookup_s(store.root, chains[i * 7919 % len(chains)]),
                },
            )
            growth.append(ratio(lookup_s["many"], lookup_s["few"]))
            rss_bytes.append(_anonymous_bytes(store.daemon.pid))
            rate = (len(chains) - before) * CHAIN / taken_s
            lookup_us = statistics.median(lookup_s["many"]) / CHAIN * 1e6
            report.say(
                f"{chunks:9,} chunks: {rate:,.0f} stored and on SSD a second, {rss_bytes[-1] / MiB:.0f} MiB private, "
                f"look-up {lookup_us:.3f} us a key, {growth[-1]:.2f} x {scales[0]:,}'s"
            )
        for (a, rss_a), (b, rss_b) in pairwise(zip(scales, rss_bytes, strict=True)):
            report.say(f"from {a:,} to {b:,}: {(rss_b - rss_a) / (b - a):.0f} B a chunk")
        restarts_s = [_restart_s(store, chains) for _ in range(1 if flags.quick else 3)]
    empty_s = statistics.median(_empty_starts_s(folder, arena_bytes, 3))
    restart_s = statistics.median(restarts_s) - empty_s
    report.say(f"restart {restart_s:.2f} s for {most:,} chunks beyond {empty_s:.2f} s of an empty daemon's start")
    report.add("lookup_growth", max(growth), "ratio", at_most=1.5)
    report.add("rss_bytes_per_chunk", (rss_bytes[-1] - rss_bytes[0]) / (most - scales[0]), "bytes", at_most=300)
    report.add("restart_s_per_million", restart_s / most * 1e6, "seconds", at_most=2)


def _stored_chain(root: Root, buffers: Sequence[Bytes]) -> list[bytes]:
    """A new chain that is kept; a store refused because too much waits for SSD is tried again."""
    keys = new_keys(CHAIN)
    while True:
        acks = root.batch_set(keys, None, buffers)
        if all(ack.stored for ack in acks):
            return keys
        reasons = {ack.name for ack in acks if ack.refused}
        assert reasons <= {"REFUSED_BACKPRESSURE", "REFUSED_ORPHAN"}, reasons
        time.sleep(BACK_OFF_S)


def _flush(daemon: DaemonProcess) -> None:
    with Connection(daemon.admin_path, "") as admin:
        admin.call("flush")


def _lookup_s(root: Root, keys: list[bytes]) -> float:
    start_s = time.perf_counter()
    run = root.batch_exists(keys)
    taken_s = time.perf_counter() - start_s
    assert run == CHAIN, f"only {run} of {CHAIN} chunks were found"
    return taken_s


def _anonymous_bytes(pid: int) -> int:
    """Private memory without the arena, whose shared pages count as the process's own while nobody else maps them."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * KiB for line in status.splitlines() if line.startswith("RssAnon"))


def _restart_s(store: Store, chains: list[list[bytes]]) -> float:
    """Kill the daemon; seconds from its start until a pass over all chains, begun then, finds everything."""
    store.daemon.kill()
    start_s = time.monotonic()
    store.daemon.start()
    with connected(store.daemon.socket_path, CHUNK_BYTES, "after a kill") as (_, root):
        while True:
            begun_s = time.monotonic() - start_s
            found = sum(root.batch_exists(keys) for keys in chains)
            if found == len(chains) * CHAIN:
                return begun_s
            assert time.monotonic() - start_s < 120, f"only {found} of {len(chains) * CHAIN} chunks came back"


def _empty_starts_s(folder: Path, arena_bytes: int, count: int) -> Iterator[float]:
    """The same without any chunk, on an empty volume: process, imports, arena pre-fault, handshake."""
    for number in range(count):
        with DaemonProcess(folder / f"empty{number}", arena_bytes=arena_bytes, ssd_bytes=GiB) as daemon:
            daemon.kill()
            start_s = time.monotonic()
            daemon.start()
            with connected(daemon.socket_path, CHUNK_BYTES):
                yield time.monotonic() - start_s


def main() -> int:
    flags = parse_flags(__doc__.partition("?")[0], full={"action": "store_true", "help": "up to a million chunks"})
    return run_parts("scale", flags, {"scale": scale})


if __name__ == "__main__":
    sys.exit(main())
