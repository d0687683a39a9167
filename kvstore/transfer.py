"""The I/O threads: they run reads, writes and deletes on volumes, loads before stores, and hand results to the loop.

A job is plain data; results are collected and the loop is woken once for many (hand-off measured at 55 us each through
an executor, 1 us this way). Threads only make system calls and hash, both without the GIL. A slot's parts-ready counter
is written here, so that a waiting engine sees a part without any hop through the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.arena import FAILED, Arena
from kvstore.errors import KVStoreError, Unavailable
from kvstore.planner import Delete, Read, Write
from kvstore.record import HEADER_BYTES
from kvstore.scheduling import be_nicer
from kvstore.slotted import SlottedVolume
from kvstore.units import PAGE_BYTES, MiB

WRITE_BATCH_BYTES = 8 * MiB
"""Neighbouring slots go out in one device write of up to this size (measured: 4-8 MiB saturate the device)."""
IO_NICER = 5
"""I/O threads stand back behind the loop, which only needs a moment; under the unit's Nice=-5 they equal engines."""
READ_BATCH_BYTES = 1 * MiB
"""Small neighbouring slots are read together up to this size: fewer hand-offs, and all threads still get work."""


@dataclass(slots=True, eq=False)
class Writes:
    """One device write: neighbouring slots of one volume."""

    writes: list[Write]
    durable: bool = False
    errors: list[KVStoreError | None] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Reads:
    """One device read: neighbouring slots of one volume, or one slot."""

    reads: list[Read]
    outcomes: list[bool | KVStoreError] = field(default_factory=list)
    """One a read: verified, absent, or why not."""


@dataclass(slots=True, eq=False)
class Deleting:
    deletes: list[Delete]
    error: KVStoreError | None = None


@dataclass(slots=True, eq=False)
class Chore:
    """Anything else that blocks: tombstones, statvfs, writing a segment for the first time."""

    call: Callable[[], object]
    result: object = None
    error: KVStoreError | None = None


Job = Writes | Reads | Deleting | Chore


class SegmentBook:
    """Which segments of one volume are formatted for which slot size: that happens once, before the first write."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, tuple[int, int]] = {}
        """First unit -> (units, stride)."""

    def adopt(self, first_unit: int, units: int, stride: int) -> None:
        """The volume brought this segment back."""
        self._known[first_unit] = (units, stride)

    def knows(self, first_unit: int) -> bool:
        """Whether a segment was formatted here."""
        return first_unit in self._known

    def ensure(self, volume: SlottedVolume, first_unit: int, units: int, stride: int) -> None:
        """Format the segment unless it is already. Any thread; others of this volume wait meanwhile."""
        with self._lock:
            if self._known.get(first_unit) == (units, stride):
                return
            self._forget(first_unit, units)
            volume.format_segment(first_unit, units, stride)
            self._known[first_unit] = (units, stride)

    def prewrite(self, volume: SlottedVolume, unit: int) -> None:
        """Write a free unit for the first time; it must be formatted before use."""
        if not volume.prewritten(unit):
            with self._lock:
                self._forget(unit, 1)
            volume.prewrite(unit, 1)

    def _forget(self, first_unit: int, units: int) -> None:
        end = first_unit + units
        for first, (count, _) in list(self._known.items()):
            if first < end and first_unit < first + count:
                del self._known[first]


class Transfer:
    """`on_done(jobs)` runs on the loop with finished jobs, in the order in which they ended."""

    def __init__(
        self,
        arena: Arena,
        volumes: Sequence[SlottedVolume],
        loop: asyncio.AbstractEventLoop,
        on_done: Callable[[list[Job]], None],
        threads: int,
    ) -> None:
        self._arena, self._volumes, self._loop, self._on_done = arena, volumes, loop, on_done
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._storing = 0
        self._most_storing = max(1, threads * 3 // 4)
        self._wanted = threading.Condition()
        self._closed = False
        self._done: list[Job] = []
        self._threads: list[threading.Thread] = []
        self.books = [SegmentBook() for _ in volumes]
        for _ in range(threads):
            self._start_thread()

    @property
    def queued_loads(self) -> int:
        return len(self._loads)

    @property
    def queued_stores(self) -> int:
        return len(self._stores) + self._storing

    def load(self, jobs: Sequence[Job]) -> None:
        """Run before all stores. Loop thread."""
        with self._wanted:
            self._loads.extend(jobs)
            self._wanted.notify(len(jobs))

    def store(self, jobs: Sequence[Job]) -> None:
        """Run when no load waits, on three quarters of the threads at most. Loop thread."""
        with self._wanted:
            self._stores.extend(jobs)
            self._wanted.notify(len(jobs))

    def close(self) -> None:
        """Finish what runs, drop what waits (the caller has drained what it wants), end the threads. Idempotent."""
        with self._wanted:
            self._closed = True
            self._wanted.notify_all()
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"kvstore-io-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _take(self) -> tuple[Job, bool] | None:
        """The next job, and whether it counts as a store; None at the end."""
        with self._wanted:
            while not self._closed:
                if self._loads:
                    return self._loads.popleft(), False
                if self._stores and self._storing < self._most_storing:
                    self._storing += 1
                    return self._stores.popleft(), True
                self._wanted.wait()
        return None

    def _work(self) -> None:
        be_nicer(IO_NICER)
        while (taken := self._take()) is not None:
            job, storing = taken
            whole = False
            try:
                self._run(job)
                whole = True
            finally:
                if not whole:
                    self._fail(job)  # a bug of ours: the thread ends with its traceback, the job does not hang
                self._finish(job, storing)

    def _finish(self, job: Job, storing: bool) -> None:
        with self._wanted:
            if storing:
                self._storing -= 1
                if self._stores:
                    self._wanted.notify()
            self._done.append(job)
            first = len(self._done) == 1
        if first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        with self._wanted:
            jobs, self._done = self._done, []
        if jobs:
            self._on_done(jobs)

    def _fail(self, job: Job) -> None:
        error = Unavailable("internal error in an I/O thread, see the log")
        if isinstance(job, Writes):
            job.errors = [error] * len(job.writes)
        elif isinstance(job, Reads):
            job.outcomes = [error] * len(job.reads)
            for read in job.reads:
                self._publish(read, FAILED)
        else:
            job.error = error
        if not self._closed:
            self._start_thread()

    def _run(self, job: Job) -> None:
        if isinstance(job, Reads):
            self._read(job)
        elif isinstance(job, Writes):
            self._write(job)
        else:
            try:
                if isinstance(job, Deleting):
                    self._volumes[job.deletes[0].volume].delete([d.item for d in job.deletes])
                else:
                    job.result = job.call()
            except KVStoreError as error:
                job.error = error

    def _read(self, job: Reads) -> None:
        reads, data = job.reads, self._arena.data
        volume = self._volumes[reads[0].volume]
        buffers = [data[r.offset : r.offset + r.item.layout.slot_bytes] for r in reads]
        try:
            if reads[0].layerwise:
                job.outcomes = [self._read_groups(volume, read, buffers[0]) for read in reads]
            else:
                job.outcomes = list(volume.read_many([r.item for r in reads], buffers))
        except KVStoreError as error:
            job.outcomes = [error] * len(reads)
        for read, outcome in zip(reads, job.outcomes, strict=True):
            self._publish(read, read.item.layout.parts if outcome is True else FAILED)

    def _read_groups(self, volume: SlottedVolume, read: Read, buffer: memoryview) -> bool:
        """Group after group, each visible as soon as it is verified."""
        groups = read.item.layout.groups
        return volume.read_into(read.item, buffer, lambda n: self._publish(read, groups[n].end_part))

    def _write(self, job: Writes) -> None:
        volume, data = self._volumes[job.writes[0].volume], self._arena.data
        items = [w.item for w in job.writes]
        buffers = [data[w.offset : w.offset + w.item.layout.slot_bytes] for w in job.writes]
        try:
            for segment in {w.segment for w in job.writes}:
                self.books[job.writes[0].volume].ensure(volume, *segment)
            job.errors = volume.write(items, buffers, job.durable)
        except KVStoreError as error:
            job.errors = [error] * len(items)

    def _publish(self, read: Read, parts: int) -> None:
        """Make parts visible, unless the slot was closed meanwhile (purge); its waiters are woken either way."""
        page = read.offset // PAGE_BYTES
        if self._arena.generations[page] == read.generation:
            self._arena.parts_ready[page] = parts
        self._arena.wake(page)


def batch_writes(writes: Sequence[Write], durable: bool) -> list[Writes]:
    """Group writes into device writes: same volume, neighbouring places, up to WRITE_BATCH_BYTES."""
    batches: list[Writes] = []
    size, end = 0, -1
    for write in sorted(writes, key=lambda w: (w.volume, w.item.place)):
        stride = write.segment[2]
        fits = batches and size + stride <= WRITE_BATCH_BYTES + PAGE_BYTES * len(batches[-1].writes)
        if fits and write.item.place == end and write.volume == batches[-1].writes[-1].volume:
            batches[-1].writes.append(write)
            size += stride
        else:
            batches.append(Writes([write], durable))
            size = stride
        end = write.item.place + stride
    return batches


def batch_reads(reads: Sequence[Read]) -> list[Reads]:
    """Group reads into device reads: same volume, neighbouring places in the order asked, up to READ_BATCH_BYTES."""
    batches: list[Reads] = []
    size, end = 0, -1
    for read in reads:
        stride = HEADER_BYTES + read.item.layout.slot_bytes
        fits = batches and size + stride <= READ_BATCH_BYTES and not read.layerwise
        if fits and read.item.place == end and read.volume == batches[-1].reads[-1].volume:
            batches[-1].reads.append(read)
            size += stride
        else:
            batches.append(Reads([read]))
            size = stride
        end = read.item.place + stride
    return batches
