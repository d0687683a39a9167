"""The hot path against a plain copy: batch_set, batch_get, leases, many clients. No SSD except where named.

The copy that ratios are against is one thread's memmove, chunk by chunk, between caller memory and slots of the same
arena that another session has reserved: pre-faulted shared memory of the same page kind and the same origin, because
two allocations of a virtual machine differ by up to 8 % in speed (measured: which host pages are behind them). A copy
between private memory is printed beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.harness import Report, interleave, parse_flags, percentile, ratio, run_parts
from bench.memory import Rotation, copy_s, private_memory
from bench.serving import UNIT_NICE, Store, connected, fetched, loading, new_keys, serving, stored, unit_nice
from kvstore.cli.connection import Connection
from kvstore.codes import Ack
from kvstore.keys import NO_PARENT
from kvstore.units import GiB, KiB, MiB, round_up

SHAPES = {
    "2MiBx16": (2 * MiB, 16, 1.15, 1.10),
    "2MiBx64": (2 * MiB, 64, 1.10, 1.06),
    "8MiBx16": (8 * MiB, 16, 1.10, 1.06),
}
"""chunk bytes, chunks a batch, targets of set and get over the bare copy."""
CALLER_BYTES = GiB
LAG_BYTES = GiB // 2
"""A batch is fetched when this much was stored after it, so that it is in no cache."""
INTERLEAVED = 4
"""Slots in a row that the plain copies, or the stores, have in the arena."""
LOOKUP_KEYS = 64
LOOKUPS_PER_S = 200


@contextmanager
def bare_memory(store: Store, chunk_bytes: int) -> Iterator[Rotation]:
    """CALLER_BYTES of the daemon's arena for plain copies: slots that another session reserves and never commits.

    They lie in turns with slots that are stored to and then given back: one half of an arena may be slower than the
    other under a hypervisor.
    """
    filler = Rotation.over(private_memory(INTERLEAVED * chunk_bytes), chunk_bytes)
    with connected(store.daemon.socket_path, chunk_bytes, "bare") as (_, root):
        views = []
        for _ in range(CALLER_BYTES // chunk_bytes // INTERLEAVED):
            views.append(root.reserve(new_keys(INTERLEAVED), [NO_PARENT] * INTERLEAVED))
            assert all(code == Ack.GRANTED for code in views[-1].codes), "no room for the plain copy's memory"
            stored(store.root, new_keys(INTERLEAVED), filler.next(INTERLEAVED))
        with Connection(store.daemon.admin_path, "") as admin:
            admin.call("purge", root=store.root.digest.hex())
        yield Rotation([np.frombuffer(view.view(i), np.uint8) for view in views for i in range(INTERLEAVED)])
        for view in views:
            view.abort()


def _page_kind(store: Store) -> str:
    with Connection(store.daemon.socket_path, "") as connection:
        return str(connection.hello("bench").page_kind)


def _pages(flags: argparse.Namespace) -> dict[str, str]:
    return {"arena.huge_pages": flags.huge_pages}


def shape(report: Report, flags: argparse.Namespace, folder: Path, name: str) -> None:
    chunk_bytes, count, set_target, get_target = SHAPES[name]
    batch_bytes = chunk_bytes * count
    rounds = (GiB if flags.quick else 4 * GiB) // batch_bytes
    lag = LAG_BYTES // batch_bytes
    arena_bytes = round_up((rounds + lag + 4) * batch_bytes, 256 * MiB) + 256 * MiB
    callers, private = (Rotation.over(private_memory(CALLER_BYTES), chunk_bytes) for _ in range(2))
    arena_bytes = max(arena_bytes, CALLER_BYTES) + CALLER_BYTES  # a session may reserve half
    with (
        serving(folder, chunk_bytes, arena_bytes=arena_bytes, ssd_bytes=0, settings=_pages(flags)) as store,
        bare_memory(store, chunk_bytes) as bare,
    ):
        page_kind = _page_kind(store)
        for _ in range(rounds + lag + 2):  # once over all slots: the bare copy's memory was written before, too
            stored(store.root, new_keys(count), callers.next(count))
        with Connection(store.daemon.admin_path, "") as admin:
            admin.call("purge", root=store.root.digest.hex())
        batches = [new_keys(count) for _ in range(rounds + lag + 2)]
        for keys in batches[:lag]:
            stored(store.root, keys, callers.next(count))
        seconds = interleave(
            rounds,
            {
                "bare set": lambda _: copy_s(bare.next(count), callers.next(count)),
                "set": lambda i: stored(store.root, batches[lag + i], callers.next(count)),
                "bare get": lambda _: copy_s(callers.next(count), bare.next(count)),
                "get": lambda i: fetched(store.root, batches[i], callers.next(count)),
                "memcpy": lambda _: copy_s(private.next(count), callers.next(count)),
            },
        )
    rate = batch_bytes / statistics.median(seconds["memcpy"]) / 1e9
    report.say(f"pages: {page_kind}; memcpy {rate:.1f} GB/s; {rounds} rounds")
    for verb, target in (("set", set_target), ("get", get_target)):
        report.add(f"{verb}_{name}", ratio(seconds[verb], seconds[f"bare {verb}"]), "ratio", at_most=target)
        report.add(f"{verb}_{name}_over_memcpy", ratio(seconds[verb], seconds["memcpy"]), "ratio")


def full(report: Report, flags: argparse.Namespace, folder: Path) -> None:
    """batch_set where each chunk has to evict another one."""
    chunk_bytes, count, arena_bytes = 2 * MiB, 64, 2 * GiB
    callers = Rotation.over(private_memory(CALLER_BYTES), chunk_bytes)
    with (
        serving(folder, chunk_bytes, arena_bytes=arena_bytes, ssd_bytes=0, settings=_pages(flags)) as store,
        bare_memory(store, chunk_bytes) as bare,
    ):
        for _ in range(arena_bytes // (chunk_bytes * count) + 1):
            stored(store.root, new_keys(count), callers.next(count))
        seconds = interleave(
            12 if flags.quick else 60,
            {
                "bare": lambda _: copy_s(bare.next(count), callers.next(count)),
                "set": lambda _: stored(store.root, new_keys(count), callers.next(count)),
            },
        )
    report.add("set_full_2MiBx64", ratio(seconds["set"], seconds["bare"]), "ratio", at_most=1.25)


def _lease_s(store: Store, keys: list[bytes]) -> float:
    start_s = time.perf_counter()
    with store.root.lease(keys) as lease:
        taken = lease.codes
    seconds = time.perf_counter() - start_s
    assert all(code.hit for code in taken), "a resident chunk was not leased"
    return seconds


def lease(report: Report, flags: argparse.Namespace, folder: Path) -> None:
    """Lease and release of 64 resident chunks: nothing is copied, so the size of a chunk must not matter."""
    rounds = 500 if flags.quick else 3000
    for name, chunk_bytes in (("64KiB", 64 * KiB), ("8MiB", 8 * MiB)):
        callers = Rotation.over(private_memory(64 * chunk_bytes), chunk_bytes)
        with serving(folder / name, chunk_bytes, arena_bytes=1280 * MiB, ssd_bytes=0) as store:
            keys = new_keys(64)
            stored(store.root, keys, callers.next(64))
            times_s = [_lease_s(store, keys) for _ in range(rounds)]
        report.say(f"lease of {name}: p99 {percentile(times_s, 0.99) * 1e6:.0f} us")
        report.add(f"lease64_{name}_p50_us", statistics.median(times_s) * 1e6, "us", at_most=150)


def busy(report: Report, flags: argparse.Namespace, folder: Path) -> None:
    """The same while another process stores at full speed and the daemon writes it all to SSD."""
    chunk_bytes = 2 * MiB
    callers = Rotation.over(private_memory(64 * chunk_bytes), chunk_bytes)
    with serving(folder, chunk_bytes, arena_bytes=2 * GiB, ssd_bytes=4 * GiB) as store:
        keys = new_keys(64)
        stored(store.root, keys, callers.next(64))
        with loading(store.daemon.socket_path, chunk_bytes, 16, 1, get=False) as rate:
            times_s = []
            end_s = time.monotonic() + (2 if flags.quick else 10)
            while time.monotonic() < end_s:
                times_s.append(_lease_s(store, keys))
                time.sleep(0.002)
            report.say(f"fill {rate() / 1e9:.2f} GB/s; lease p99 {percentile(times_s, 0.99) * 1e6:.0f} us")
    report.add("lease64_busy_p50_us", statistics.median(times_s) * 1e6, "us", at_most=300)


def clients(report: Report, flags: argparse.Namespace, folder: Path) -> None:
    """One process, then eight, store and fetch as fast as they can; a paced ninth asks what is there."""
    chunk_bytes, seconds = 2 * MiB, 1.2 if flags.quick else 6.0
    nices = sorted({0, unit_nice()}, reverse=True)
    if len(nices) == 1:
        report.say(f"not root: the daemon runs at nice 0, not at the unit's {UNIT_NICE}")
    for nice in nices:
        with serving(folder / str(nice), chunk_bytes, arena_bytes=2 * GiB, ssd_bytes=0, nice=nice) as store:
            asked = new_keys(LOOKUP_KEYS)
            stored(store.root, asked, Rotation.over(private_memory(LOOKUP_KEYS * chunk_bytes), chunk_bytes).pieces)
            with loading(store.daemon.socket_path, chunk_bytes, 16, 1, get=True) as rate:
                time.sleep(seconds)
                one = rate()
            with loading(store.daemon.socket_path, chunk_bytes, 16, 8, get=True) as rate:
                times_s = _lookups(store, asked, seconds)
                eight = rate()
        report.say(f"nice {nice}: one client {one / 1e9:.2f} GB/s, eight {eight / 1e9:.2f} GB/s")
        p99_ms = percentile(times_s, 0.99) * 1e3
        if nice == nices[-1]:
            report.add("clients8_throughput", eight / one, "ratio", at_least=1.0)
            report.add("lookup_p99_ms", p99_ms, "ms", at_most=5)
        else:
            report.add("lookup_p99_nice0_ms", p99_ms, "ms")


def _lookups(store: Store, keys: list[bytes], seconds: float) -> list[float]:
    times_s = []
    next_s = time.perf_counter()
    end_s = next_s + seconds
    while next_s < end_s:
        time.sleep(max(0.0, next_s - time.perf_counter()))
        start_s = time.perf_counter()
        store.root.batch_exists(keys)
        times_s.append(time.perf_counter() - start_s)
        next_s = max(next_s + 1 / LOOKUPS_PER_S, time.perf_counter())
    return times_s


def main() -> int:
    about = "pages of the arena and of the bare copy's memory: never (4 KiB, the default here) or auto"
    huge_pages = {"choices": ["never", "auto"], "default": "never", "help": about}
    flags = parse_flags(__doc__.partition("\n")[0], huge_pages=huge_pages)
    shapes = {name: lambda r, f, p, name=name: shape(r, f, p, name) for name in SHAPES}
    return run_parts("hotpath", flags, {**shapes, "full": full, "lease": lease, "busy": busy, "clients": clients})


if __name__ == "__main__":
    sys.exit(main())
