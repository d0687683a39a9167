"""A daemon of one benchmark's own, a client connected to it, and processes that load it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

from bench.memory import Bytes, Rotation, private_memory
from kvstore.client import Client, Root
from kvstore.keys import KEY_BYTES
from kvstore.layout import one_part_pool
from kvstore.namespace import BaseNamespace
from kvstore.testing.daemon import DaemonProcess

CONNECT_S = 30.0
PREFAULT_BEGINS_S = 0.02
"""From connecting until the client's background thread that pages its mapping in has started."""
DEADLINE_S = 10.0
"""A benchmark measures slowness, it does not turn it into misses."""


UNIT_NICE = -5
"""As in systemd/kvstore.service; an ordinary user's daemon runs at 0."""


def unit_nice() -> int:
    return UNIT_NICE if os.geteuid() == 0 else 0


@dataclass(frozen=True, slots=True)
class Store:
    daemon: DaemonProcess
    client: Client
    root: Root


def namespace(chunk_bytes: int) -> BaseNamespace:
    return BaseNamespace(model="bench", weights="none", pools=(one_part_pool(chunk_bytes),))


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(KEY_BYTES) for _ in range(count)]


@contextmanager
def connected(socket_path: Path, chunk_bytes: int, label: str = "bench") -> Iterator[tuple[Client, Root]]:
    """A client whose mapping of the arena is paged in: its background thread does that at the start."""
    with Client(socket_path, label=label, deadline_s=DEADLINE_S) as client:
        assert client.wait_connected(CONNECT_S), client.last_error
        time.sleep(PREFAULT_BEGINS_S)
        while any(thread.name == "kvstore-prefault" for thread in threading.enumerate()):
            time.sleep(PREFAULT_BEGINS_S)
        yield client, client.root(namespace(chunk_bytes))


@contextmanager
def serving(folder: Path, chunk_bytes: int, **options: object) -> Iterator[Store]:
    """A started daemon, at the unit's nice value where allowed, and a client; options as DaemonProcess."""
    with (
        DaemonProcess(folder / "daemon", **{"nice": unit_nice(), **options}) as daemon,  # type: ignore[arg-type]
        connected(daemon.socket_path, chunk_bytes) as (client, root),
    ):
        yield Store(daemon, client, root)


def stored(root: Root, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> float:
    """Seconds of one batch_set as a new chain; all must be kept."""
    start_s = time.perf_counter()
    acks = root.batch_set(keys, None, buffers)
    taken_s = time.perf_counter() - start_s
    refused = [ack.name for ack in acks if not ack.stored]
    assert not refused, f"{len(refused)} of {len(keys)} chunks were refused: {refused[0]}"
    return taken_s


def fetched(root: Root, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> float:
    """Seconds of one batch_get; all must be served."""
    start_s = time.perf_counter()
    codes = root.batch_get(keys, buffers)
    taken_s = time.perf_counter() - start_s
    missed = [code.name for code in codes if not code.hit]
    assert not missed, f"{len(missed)} of {len(keys)} chunks were missed: {missed[0]}"
    return taken_s


@contextmanager
def loading(
    socket_path: Path, chunk_bytes: int, count: int, processes: int, get: bool
) -> Iterator[Callable[[], float]]:
    """Processes that store batches (and fetch them again where `get`) as fast as they can.

    Yields a function that returns the bytes a second of all together since the last call. They end with the block.
    """
    context = multiprocessing.get_context("spawn")
    moved = context.RawArray("q", processes)
    stop = context.Event()
    ready = [context.Pipe(duplex=False) for _ in range(processes)]
    workers = [
        context.Process(target=_load, args=(socket_path, chunk_bytes, count, get, _Shared(number, moved, stop), there))
        for number, (_, there) in enumerate(ready)
    ]
    for worker in workers:
        worker.start()
    for here, there in ready:
        there.close()
        here.recv()
    before, since_s = sum(moved[:]), time.perf_counter()

    def bytes_per_s() -> float:
        nonlocal before, since_s
        now_bytes, now_s = sum(moved[:]), time.perf_counter()
        rate = (now_bytes - before) / (now_s - since_s)
        before, since_s = now_bytes, now_s
        return float(rate)

    try:
        yield bytes_per_s
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        assert not any(worker.exitcode for worker in workers), "a loading process failed"


@dataclass(frozen=True, slots=True)
class _Shared:
    """What a loading process shares with its parent: its number, bytes moved by each process, and when to stop."""

    number: int
    moved: ctypes.Array[ctypes.c_longlong]
    stop: Event


def _load(socket_path: Path, chunk_bytes: int, count: int, get: bool, shared: _Shared, ready: Connection) -> None:
    buffers = Rotation.over(private_memory(4 * count * chunk_bytes), chunk_bytes)
    with connected(socket_path, chunk_bytes, f"load {shared.number}") as (_, root):
        ready.send(True)
        while not shared.stop.is_set():
            keys = new_keys(count)
            acks = root.batch_set(keys, None, buffers.next(count))
            done = sum(ack.stored for ack in acks)
            if get and done:
                done += sum(code.hit for code in root.batch_get(keys, buffers.next(count)))
            shared.moved[shared.number] += done * chunk_bytes
