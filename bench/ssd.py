"""The SSD tier against fio in the same run: pool writes, stores until on SSD, cold gets, small pages, fresh segments.

All daemons live side by side and take turns with fio, round by round. The reference is one figure each way: the median
of fio's runs at its best depth and jobs. A store counts from the call until the daemon says that nothing waits for SSD.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from bench.fio import BUFFER_BYTES, Fio, Setting, require_fio
from bench.harness import Report, interleave, parse_flags, run_parts
from bench.memory import Rotation, huge_pages, private_memory
from bench.serving import Store, fetched, new_keys, serving, stored
from kvstore.arena import Arena
from kvstore.backend import Item
from kvstore.backends.ssd import SSDVolume
from kvstore.cli.connection import Connection
from kvstore.layout import one_part_pool, slot_layout
from kvstore.record import HEADER_BYTES, sum_extents
from kvstore.slab import Slab
from kvstore.units import GiB, KiB, MiB

IO_THREADS = 8
CALLER_BYTES = GiB
POOL_ARENA_BYTES = 512 * MiB
POOL_CHUNK_BYTES = 8 * MiB
POOL_CHUNKS = 32


@dataclass(frozen=True, slots=True)
class Size:
    """One daemon's sizes. A batch is fetched `lag` stores after it was stored: out of the arena, still on the volume.

    Between store and fetch 2 x lag batches pass through both tiers: more than the arena holds, fewer than the volume.
    """

    chunk_bytes: int
    count: int
    arena_bytes: int
    ssd_bytes: int
    lag: int

    @property
    def batch_bytes(self) -> int:
        return self.chunk_bytes * self.count


SIZES = {
    "2MiB": Size(2 * MiB, 128, 1280 * MiB, 4 * GiB, 6),
    "8MiB": Size(8 * MiB, 32, 1280 * MiB, 4 * GiB, 6),
    "128KiBx256": Size(128 * KiB, 256, 256 * MiB, GiB, 10),
}
FRESH = Size(8 * MiB, 32, 1280 * MiB, 8 * GiB, 0)


@dataclass(slots=True)
class Turns:
    """Stores and cold gets of one daemon, in turns."""

    size: Size
    store: Store
    callers: Rotation
    batches: list[list[bytes]] = field(default_factory=list)

    def set(self) -> float:
        """Seconds from the call until everything is on SSD."""
        keys = new_keys(self.size.count)
        self.batches.append(keys)
        start_s = time.perf_counter()
        stored(self.store.root, keys, self.callers.next(self.size.count))
        with Connection(self.store.daemon.admin_path, "") as admin:
            admin.call("flush")
        return time.perf_counter() - start_s

    def get(self) -> float:
        return fetched(self.store.root, self.batches[-1 - self.size.lag], self.callers.next(self.size.count))

    def fill(self) -> None:
        """Write the whole volume once, so that what follows recycles written slots."""
        for _ in range(self.size.ssd_bytes // self.size.batch_bytes + 1):
            self.set()


def tier(report: Report, flags: argparse.Namespace, folder: Path) -> None:
    need_bytes = BUFFER_BYTES + POOL_ARENA_BYTES + sum(size.arena_bytes for size in SIZES.values())
    with ExitStack() as stack:
        huge = stack.enter_context(huge_pages(need_bytes, report.say))
        fio = Fio(folder, huge, GiB // 2 if flags.quick else GiB)
        best = {verb: _best(fio, verb, report, flags) for verb in ("write", "read")}
        copies = private_memory(256 * MiB), private_memory(256 * MiB)
        memory = private_memory(CALLER_BYTES)
        turns: dict[str, Turns] = {}
        for name, size in SIZES.items():
            store = stack.enter_context(_daemon(folder / name, size))
            turns[name] = Turns(size, store, Rotation.over(memory, size.chunk_bytes))
            turns[name].fill()
        report.say("volumes are written once, slots are recycled from here on")
        pool = stack.enter_context(_pool(folder / "pool"))
        steps: dict[str, Callable[[int], float]] = {
            "write": lambda _: GiB / fio.again(best["write"]),
            "read": lambda _: GiB / fio.again(best["read"]),
            "beside": lambda _: GiB / fio.beside(best["write"], *copies),
            "pool": lambda _: pool(False),
            "pool_csum": lambda _: pool(True),
        }
        for name, turn in turns.items():
            steps[f"store_{name}"] = lambda _, turn=turn: turn.set()  # type: ignore[misc]
            steps[f"get_{name}"] = lambda _, turn=turn: turn.get()  # type: ignore[misc]
        seconds = interleave(2 if flags.quick else 25, steps, warm_up=1)
    fio_s = {name: statistics.median(seconds[name]) for name in ("write", "read", "beside")}
    for name, taken_s in fio_s.items():
        spread = statistics.stdev(seconds[name]) / taken_s / len(seconds[name]) ** 0.5
        report.say(f"fio {name}: {GiB / taken_s / 1e9:.2f} GB/s, +-{spread:.1%}")

    def share(step: str, batch_bytes: int, reference: str) -> float:
        return (fio_s[reference] / GiB) / (statistics.median(seconds[step]) / batch_bytes)

    pool_bytes = POOL_CHUNK_BYTES * POOL_CHUNKS
    report.add("pool_write_8MiB", share("pool", pool_bytes, "write"), "ratio", at_least=0.95)
    report.add("pool_write_csum_8MiB", share("pool_csum", pool_bytes, "write"), "ratio", at_least=0.80)
    for name in ("2MiB", "8MiB"):
        batch_bytes = SIZES[name].batch_bytes
        report.add(f"store_{name}", share(f"store_{name}", batch_bytes, "beside"), "ratio", at_least=0.95)
        report.add(f"store_{name}_over_fio", share(f"store_{name}", batch_bytes, "write"), "ratio")
        report.add(f"get_{name}", share(f"get_{name}", batch_bytes, "read"), "ratio", at_least=0.90)
    small = "128KiBx256"
    report.add(f"get_{small}", share(f"get_{small}", SIZES[small].batch_bytes, "read"), "ratio", at_least=0.70)


def fresh(report: Report, flags: argparse.Namespace, folder: Path) -> None:
    """Stores into segments that were never written, before the daemon's idle time could write them."""
    with huge_pages(BUFFER_BYTES + FRESH.arena_bytes, report.say) as huge:
        fio = Fio(folder, huge, GiB // 2 if flags.quick else GiB)
        best = _best(fio, "write", report, flags)
        with _daemon(folder / "fresh", FRESH) as store:
            turns = Turns(FRESH, store, Rotation.over(private_memory(CALLER_BYTES), FRESH.chunk_bytes))
            rounds = 3 if flags.quick else 20
            seconds = interleave(rounds, {"fio": lambda _: GiB / fio.again(best), "set": lambda _: turns.set()}, 1)
    taken_s = statistics.median(seconds["set"]) / FRESH.batch_bytes
    report.add("store_fresh_8MiB", statistics.median(seconds["fio"]) / GiB / taken_s, "ratio", at_least=0.65)


def _best(fio: Fio, verb: str, report: Report, flags: argparse.Namespace) -> Setting:
    """Looked for once a run: both parts measure against the same depth and jobs."""
    if verb not in flags.best:
        flags.best[verb] = fio.best(verb, report.say, twice=not flags.quick)
    setting: Setting = flags.best[verb]
    return setting


@contextmanager
def _daemon(folder: Path, size: Size) -> Iterator[Store]:
    with serving(folder, size.chunk_bytes, arena_bytes=size.arena_bytes, ssd_bytes=size.ssd_bytes) as store:
        yield store


@contextmanager
def _pool(folder: Path) -> Iterator[Callable[[bool], float]]:
    """The daemon's way of writing without the daemon: threads write chunks of an arena into recycled slots.

    Yields a function from "with checksums?" to the seconds of one batch.
    """
    layout = slot_layout(one_part_pool(POOL_CHUNK_BYTES))
    arena = Arena.create(POOL_ARENA_BYTES)
    arena.array[:] = 0x3C
    target = SSDVolume.open(folder, 2 * POOL_CHUNKS * POOL_CHUNK_BYTES)
    target.load()
    stride_bytes = HEADER_BYTES + layout.slot_bytes
    slab = Slab(target.size_bytes, target.unit_bytes, HEADER_BYTES)
    places: list[int] = []
    while len(places) < POOL_CHUNKS:
        place = slab.allocate(stride_bytes)
        assert place is not None
        segment = slab.segment_of(place)
        if place == segment.base:
            target.prewrite(segment.first_unit, segment.units)
            target.format_segment(segment.first_unit, segment.units, stride_bytes)
        places.append(place)
    buffers = [arena.data[n * layout.slot_bytes : (n + 1) * layout.slot_bytes] for n in range(POOL_CHUNKS)]
    sequence = 0

    def batch_s(checksums: bool) -> float:
        nonlocal sequence
        sequence += POOL_CHUNKS
        keys = new_keys(POOL_CHUNKS)
        items = [
            Item(bytes(32), 0, key, layout, place=place, sequence=sequence + n)
            for n, (key, place) in enumerate(zip(keys, places, strict=True))
        ]
        with mock.patch("kvstore.backends.ssd.writer.sum_extents", sum_extents if checksums else _no_sums):
            start_s = time.perf_counter()
            results = list(threads.map(lambda item, buffer: target.write([item], [buffer]), items, buffers))
            taken_s = time.perf_counter() - start_s
        assert all(result == [None] for result in results), results
        return taken_s

    with ThreadPoolExecutor(IO_THREADS) as threads:
        yield batch_s
    target.close()
    buffers.clear()
    arena.close()


def _no_sums(payload: memoryview, extents: tuple[tuple[int, int], ...], seed: int) -> tuple[bytes, ...]:
    return (bytes(16),) * len(extents)


def main() -> int:
    require_fio()
    flags = parse_flags(__doc__.partition("\n")[0])
    flags.best = {}
    return run_parts("ssd", flags, {"tier": tier, "fresh": fresh})


if __name__ == "__main__":
    sys.exit(main())
