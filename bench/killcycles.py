"""Kill cycles: real clients under load, SIGKILL at random times, an oracle outside the daemon (fault 2).

`python -m bench.killcycles --cycles 30 --json`. Each cycle starts the daemon on the same folder, checks what earlier
cycles were promised, lets two client processes store and load for a moment and kills the daemon. The oracle is this
process and the clients: payload is a function of the key, and they remember what was acknowledged, and how.

wrong: bytes served that are not those stored under that key. durable_lost: chunks acknowledged as STORED_SSD that are
gone, on a volume that was never full. Both must be 0. The seed of each run is printed; `--seed` repeats its choices
(not its timing).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from bench.harness import Report, parse_flags, scratch
from bench.serving import namespace
from bench.trace import Payload
from kvstore.client import Client, Root
from kvstore.codes import Ack
from kvstore.keys import NO_PARENT
from kvstore.testing.daemon import DaemonProcess
from kvstore.units import GiB, KiB, MiB

CLIENTS = 2
CHUNK_BYTES = 256 * KiB
BATCH = 8
ARENA_BYTES = 64 * MiB
SSD_BYTES = 4 * GiB
CHECKED_A_CYCLE = 256
DEADLINE_S = 5.0
CONNECT_S = 60.0


def main() -> int:
    flags = parse_flags(
        __doc__ or "",
        cycles={"type": int, "default": 30, "help": "kills (default 30)"},
        seed={"type": int, "default": None, "help": "repeat the choices of an earlier run"},
    )
    seed = flags.seed if flags.seed is not None else int.from_bytes(os.urandom(4), "big")
    report = Report("killcycles")
    report.say(f"seed {seed}")
    cycles = min(10, flags.cycles) if flags.quick else flags.cycles
    with scratch(flags.folder) as folder:
        total = run(folder, cycles, random.Random(seed), report)
    report.add("cycles", cycles, "kills", at_least=1)
    report.add("chunks_checked", total["checked"], "chunks", at_least=1)
    report.add("wrong", total["wrong"], "chunks", at_most=0)
    report.add("durable_lost", total["lost"], "chunks", at_most=0)
    return report.finish(flags.json)


def run(folder: Path, cycles: int, dice: random.Random, report: Report) -> Counter[str]:
    """Counts of `checked`, `wrong` and `lost` chunks over all cycles; after the last kill there is one more check."""
    promised: dict[bytes, bool] = {}
    """Key -> whether it was acknowledged as on SSD."""
    total: Counter[str] = Counter()
    home = folder / "0"
    for cycle in range(cycles + 1):
        with DaemonProcess(home, arena_bytes=ARENA_BYTES, ssd_bytes=SSD_BYTES) as daemon:
            total += _check(daemon, promised, dice)
            if cycle < cycles:
                counts, more = _load_and_kill(daemon, dice)
                total += counts
                promised.update(more)
        if cycle % 10 == 0:
            report.say(f"cycle {cycle}: {len(promised)} promised, {dict(total)}")
        if len(promised) * CHUNK_BYTES > SSD_BYTES // 2:
            report.say("the volume is half full: going on with a new one, so that nothing is evicted")
            home, promised = folder / str(cycle + 1), {}
    return total


def _check(daemon: DaemonProcess, promised: dict[bytes, bool], dice: random.Random) -> Counter[str]:
    """Fetch a sample of what was promised."""
    payload, counts = Payload(CHUNK_BYTES), Counter[str]()
    sample = dice.sample(sorted(promised), min(CHECKED_A_CYCLE, len(promised)))
    buffers = [np.empty(CHUNK_BYTES, np.uint8) for _ in range(BATCH)]
    with Client(daemon.socket_path, label="oracle", deadline_s=DEADLINE_S) as client:
        assert client.wait_connected(CONNECT_S), client.last_error
        root = client.root(namespace(CHUNK_BYTES))
        for key in sample:
            code = root.batch_get([key], buffers[:1])[0]
            if code.hit:
                counts["wrong"] += payload.wrong_bytes(key, buffers[0]) > 0
            elif promised[key]:
                counts["lost"] += 1
                print(f"lost: {key.hex()} {code.name}", file=sys.stderr)
            counts["checked"] += 1
    return counts


def _load_and_kill(daemon: DaemonProcess, dice: random.Random) -> tuple[Counter[str], dict[bytes, bool]]:
    """Clients work, the daemon dies: counts, and what was acknowledged."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pipes = [context.Pipe(duplex=False) for _ in range(CLIENTS)]
    workers = [
        context.Process(target=_client, args=(daemon.socket_path, dice.randrange(1 << 30), stop, there))
        for _, there in pipes
    ]
    for worker in workers:
        worker.start()
    for here, _ in pipes:
        here.recv()
    stop.wait(dice.uniform(0.05, 0.8))
    daemon.kill()
    stop.set()
    counts: Counter[str] = Counter()
    promised: dict[bytes, bool] = {}
    for here, _ in pipes:
        more_counts, more_promised = here.recv()
        counts += more_counts
        promised.update(more_promised)
    for worker in workers:
        worker.join()
    return counts, promised


def _client(socket_path: Path, seed: int, stop: Event, out: Connection) -> None:
    """Store new chunks, some of them durably, and load earlier ones, until told to stop."""
    dice, payload = random.Random(seed), Payload(CHUNK_BYTES)
    buffers = [np.empty(CHUNK_BYTES, np.uint8) for _ in range(BATCH)]
    promised: dict[bytes, bool] = {}
    counts: Counter[str] = Counter()
    with Client(socket_path, label="load", deadline_s=DEADLINE_S) as client:
        client.wait_connected(CONNECT_S)
        root = client.root(namespace(CHUNK_BYTES))
        out.send("ready")
        while not stop.is_set():
            keys = [dice.randbytes(32) for _ in range(dice.randint(1, BATCH))]
            _store(root, keys, payload, buffers, dice.random() < 0.5, promised)
            if promised:
                again = dice.choices(sorted(promised), k=min(4, len(promised)))
                for key, code in zip(again, _get_each(root, again, buffers), strict=True):
                    if code:
                        counts["checked"] += 1
                        counts["wrong"] += payload.wrong_bytes(key, buffers[again.index(key)]) > 0
    out.send((counts, promised))


def _store(
    root: Root,
    keys: Sequence[bytes],
    payload: Payload,
    buffers: Sequence[np.ndarray],
    durable: bool,
    promised: dict[bytes, bool],
) -> None:
    for key, buffer in zip(keys, buffers, strict=False):
        payload.fill(key, buffer)
    acks = root.batch_set(keys, [NO_PARENT] * len(keys), buffers[: len(keys)], durable=durable)
    promised.update({key: ack == Ack.STORED_SSD for key, ack in zip(keys, acks, strict=True) if ack.stored})


def _get_each(root: Root, keys: Sequence[bytes], buffers: Sequence[np.ndarray]) -> list[bool]:
    """Each key alone: a chain's rule would stop at the first that is gone."""
    return [root.batch_get([key], [buffers[keys.index(key)]])[0].hit for key in keys]


if __name__ == "__main__":
    sys.exit(main())
