"""The data verbs, one method each. Loop thread only; nothing here blocks, and what takes time answers with a future.

The planner decides at once and the answer is true at that moment; reads, writes and deletes go to the I/O threads,
whose results come back through `_finished`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.arena import Arena
from kvstore.clock import Clock
from kvstore.codes import Ack
from kvstore.errors import Invalid, KVStoreError, Throttled
from kvstore.index import BUSY_WRITE, Series, ssd_location
from kvstore.keys import KEY_BYTES
from kvstore.ledger import Ledger
from kvstore.manager import views
from kvstore.manager.settings import ManagerSettings
from kvstore.manager.volumes import Volumes
from kvstore.namespace import BaseNamespace, RequestIdentity
from kvstore.planner import Delete, Limits, Planner, Read, Work, WriteBudget
from kvstore.record import HEADER_BYTES
from kvstore.slab import UNIT_BYTES, Slab
from kvstore.slotted import SlottedVolume
from kvstore.transfer import Deleting, Job, Reads, Transfer, Writes, batch_reads, batch_writes
from kvstore.units import MiB
from kvstore.wire.messages import Committed, Leased, Reserved, RootOpened, Tiers

_LOG = logging.getLogger("kvstore.manager")
EXPIRE_EVERY_S = 1.0
ROOTS_FORBIDDEN = 64
"""`rm` of a key that is not here still forbids old records of it, under so many roots at most: each costs a sync."""


@dataclass(slots=True, eq=False)
class _Durable:
    """A commit that waits for its rows to reach SSD."""

    codes: bytearray
    waiting: int
    future: asyncio.Future[Committed]


class Manager:
    def __init__(
        self,
        arena: Arena,
        volumes: Sequence[SlottedVolume],
        *,
        ledger: Ledger,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        settings: ManagerSettings | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        """`left_out`: why volumes of the configuration could not be opened, one sentence each."""
        self.arena, self.ledger, self.clock, self._loop = arena, ledger, clock, loop
        self.settings = settings or ManagerSettings()
        self.planner = Planner(
            Slab(arena.size_bytes, arena_unit_bytes(arena.size_bytes)),
            [Slab(v.size_bytes, v.unit_bytes, HEADER_BYTES) for v in volumes],
            arena.generations,
            arena.parts_ready,
            clock,
            ledger,
            Limits(lease_ttl_s=self.settings.lease_ttl_s),
            self.settings.policy,
            WriteBudget(self.settings.write_bytes_per_s, self.settings.write_bytes_per_day),
        )
        self.transfer = Transfer(arena, volumes, loop, self._finished, self.settings.io_threads)
        self.volumes = Volumes(volumes, self.planner, self.transfer, loop, self.settings)
        self.started_s = clock.now()
        self.draining = False
        self.left_out = tuple(left_out)
        self._durable: dict[int, list[tuple[_Durable, int]]] = {}
        """Row -> (commit that waits for it, its place in the answer)."""
        self._progress = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    # ---- life --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring back what the volumes hold, then begin to keep house. Raises the volume's errors."""
        await self.volumes.recover()
        self._keep_house()

    async def drain(self, deadline_s: float) -> int:
        """Take no new stores and wait for queued writes; returns the chunks whose write did not make it in time."""
        self.draining = True
        state = self.planner.state
        end_s = self.clock.now() + deadline_s
        while state.dirty_bytes and self.clock.now() < end_s:
            await self.progress(min(0.5, max(0.01, end_s - self.clock.now())))
        return sum(1 for row in range(len(state.columns.keys)) if state.writing(row))

    def close(self) -> None:
        """Stop the I/O threads and close the volumes. Idempotent. Futures of durable commits are answered unstored."""
        if self._timer is not None:
            self._timer.cancel()
        self.transfer.close()
        self.volumes.close()

    def welcome(self) -> dict[str, Any]:
        """The fields of `Welcome` that the manager knows."""
        return {
            "arena_id": self.arena.arena_id,
            "arena_bytes": self.arena.size_bytes,
            "control_bytes": self.arena.control_bytes,
            "page_kind": self.arena.page_kind,
            "lease_ttl_s": self.settings.lease_ttl_s,
        }

    def reconfigure(self, settings: ManagerSettings) -> None:
        """Apply what a reload may change: lease TTL, write budgets, free-space floor."""
        self.settings = settings
        self.planner.state.budget.change(settings.write_bytes_per_s, settings.write_bytes_per_day)
        self.volumes.settings = settings

    # ---- sessions ----------------------------------------------------------------------------------------------

    def session_opened(self, session: bytes, label: str) -> None:
        self.planner.session_opened(session, label)

    def session_closed(self, session: bytes) -> None:
        self.planner.session_closed(session)

    def owner_gone(self, owner: int) -> None:
        self.planner.owner_gone(owner)

    def open_root(self, session: bytes, namespace: BaseNamespace, identity: RequestIdentity) -> RootOpened:
        root, fresh = self.planner.open_root(self.planner.state.session(session), namespace, identity)
        if fresh:
            self.volumes.note_root(root)
        return RootOpened(root.handle, root.digest)

    # ---- loads -------------------------------------------------------------------------------------------------

    def lookup(self, session: bytes, root: int, pool: int, keys: bytes) -> Tiers:
        return Tiers(self.planner.loads.lookup(self._series(session, root, pool), keys))

    def lease(self, session: bytes, root: int, pool: int, keys: bytes, layerwise: bool) -> Leased:
        return self._lease(session, root, pool, keys, layerwise, self.settings.lease_ttl_s)

    def pin(self, session: bytes, root: int, pool: int, keys: bytes, ttl_s: float) -> Leased:
        """A lease that lasts longer; `unpin` or `release` ends it."""
        return self._lease(session, root, pool, keys, False, ttl_s)

    def release(self, session: bytes, lease: int, copied_bytes: int = 0, seconds: float = 0.0) -> None:
        state = self.planner.state
        self.planner.loads.release(state.session(session), lease)
        if copied_bytes:
            self.ledger.count("loaded_bytes_total", "", copied_bytes)
            self.ledger.count("load_seconds_total", "", seconds)

    def unpin(self, session: bytes, lease: int) -> None:
        self.release(session, lease)

    def renew(self, session: bytes, lease: int) -> None:
        self.planner.loads.renew(self.planner.state.session(session), lease, self.settings.lease_ttl_s)

    # ---- stores ------------------------------------------------------------------------------------------------

    def reserve(
        self,
        session: bytes,
        owner: int,
        root: int,
        pool: int,
        shard: int,
        keys: bytes,
        parents: bytes,
        durable: bool = False,
    ) -> Reserved:
        series = self._series(session, root, pool)
        if self.draining:
            count = len(keys) // KEY_BYTES
            return Reserved(0, bytes([Ack.REFUSED_CLOSED]) * count, bytes(8 * count))
        made, codes, offsets = self.planner.stores.reserve(
            self.planner.state.session(session), owner, series, shard, keys, parents, durable
        )
        return Reserved(made.number if made else 0, codes, offsets.tobytes())

    def commit(
        self, session: bytes, reservation: int, first: int, count: int, durable: bool = False, hold: bool = False
    ) -> Committed | asyncio.Future[Committed]:
        codes, rows, work = self.planner.stores.commit(
            self.planner.state.session(session), reservation, first, count, hold, durable
        )
        self._submit(work, durable)
        if not durable:
            return Committed(bytes(codes))
        return self._wait_durable(codes, rows)

    def abort(self, session: bytes, reservation: int) -> None:
        self.planner.stores.end(self.planner.state.session(session), reservation)

    # ---- operators ---------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """The data socket's name for `stat`."""
        return self.stat()

    def status(self) -> dict[str, Any]:
        return views.status(self)

    def stat(self) -> dict[str, Any]:
        return views.stat(self)

    def ls(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return views.ls(self, arguments)

    def inspect(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return views.inspect(self, arguments)

    def rm(self, arguments: Mapping[str, Any]) -> Awaitable[dict[str, Any]]:
        return self._remove(views.hex_key(arguments), views.roots_named(self, arguments))

    def purge(self, arguments: Mapping[str, Any]) -> Awaitable[dict[str, Any]]:
        roots = views.roots_named(self, arguments)
        if not arguments.get("root") or len(roots) != 1:
            raise Invalid(f"purge takes the hex digest of one root; {len(roots)} match. `kvstore ls` shows them")
        return self._purge(roots[0])

    async def flush(self) -> dict[str, Any]:
        """Wait until every wanted write is on SSD."""
        before = self.ledger.value("ssd_written_chunks_total")
        while self.planner.state.dirty_bytes:
            await self.progress(1.0)
        return {"written": int(self.ledger.value("ssd_written_chunks_total") - before)}

    async def progress(self, timeout_s: float) -> None:
        """Until some I/O has ended, or the time is over."""
        self._progress.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._progress.wait()
        except TimeoutError:
            return

    # ---- inside ------------------------------------------------------------------------------------------------

    def _series(self, session: bytes, root: int, pool: int) -> Series:
        return self.planner.series(self.planner.state.session(session), root, pool)

    def _lease(self, session: bytes, root: int, pool: int, keys: bytes, layerwise: bool, ttl_s: float) -> Leased:
        lease, codes, offsets, generations, work = self.planner.loads.lease(
            self.planner.state.session(session), self._series(session, root, pool), keys, layerwise, ttl_s
        )
        self._submit(work)
        return Leased(lease.number if lease else 0, codes, offsets.tobytes(), generations.tobytes())

    def _submit(self, work: Work, durable: bool = False) -> None:
        if work.reads:
            self.transfer.load(batch_reads(work.reads))
        if work.writes:
            self.transfer.store(batch_writes(work.writes, durable))
        if work.deletes:
            self.transfer.store([Deleting([delete]) for delete in work.deletes])
        if work.ahead:
            self._loop.call_soon(self.planner.stores.prepare, *work.ahead)

    def _wait_durable(self, codes: bytearray, rows: list[int]) -> Committed | asyncio.Future[Committed]:
        columns = self.planner.state.columns
        busy = [(i, row) for i, row in enumerate(rows) if row >= 0 and columns.busy[row] & BUSY_WRITE]
        if not busy:
            return Committed(bytes(codes))
        wait = _Durable(codes, len(busy), self._loop.create_future())
        for i, row in busy:
            self._durable.setdefault(row, []).append((wait, i))
        return wait.future

    def _written(self, row: int, durable: bool, error: KVStoreError | None) -> None:
        """Answer the durable commits that waited for this row."""
        for wait, i in self._durable.pop(row, ()):
            if error is not None and wait.codes[i] != Ack.EXISTS:
                wait.codes[i] = Ack.STORED_DRAM
            elif error is None and durable:
                wait.codes[i] = Ack.STORED_SSD
            wait.waiting -= 1
            if not wait.waiting and not wait.future.done():
                wait.future.set_result(Committed(bytes(wait.codes)))

    def _finished(self, jobs: list[Job]) -> None:
        for job in jobs:
            if isinstance(job, Reads):
                for read, outcome in zip(job.reads, job.outcomes, strict=True):
                    error = outcome if isinstance(outcome, KVStoreError) else None
                    if outcome is not True:
                        self._log_failed_read(read, error)
                    self._submit(self.planner.loads.filled(read, outcome is True, error))
            elif isinstance(job, Writes):
                self._finished_writes(job)
            elif isinstance(job, Deleting):
                self._finished_deletes(job.deletes, job.error)
            else:
                self.volumes.finished(job)
        self._progress.set()

    def _log_failed_read(self, read: Read, error: KVStoreError | None) -> None:
        """The cause, for whoever wonders about a miss; log.py limits the rate."""
        why = error if error is not None else "another record, or none, is at its place"
        path = self.volumes.all[read.volume].path
        _LOG.warning("chunk %s of volume %s is a miss: %s", read.item.key.hex()[:16], path, why)

    def _finished_writes(self, job: Writes) -> None:
        ended = list(zip(job.writes, job.errors, strict=True))
        failed = [(write, error) for write, error in ended if error is not None]
        if failed:
            self.volumes.troubled(*failed[0])
            self.volumes.rest(failed[0][0].volume, failed[0][1])
        else:
            self.volumes.worked(job.writes[0].volume)
        work = self.planner.behind.written(ended)
        self._submit(work, job.durable)
        again = {write.row for write in work.writes}
        for write, error in ended:
            if write.row not in again:
                self._written(write.row, job.durable, error)

    def _finished_deletes(self, deletes: list[Delete], error: KVStoreError | None) -> None:
        for delete in deletes:
            if error is None:
                self.planner.removal.deleted(ssd_location(delete.volume, delete.item.place))
            else:
                self.ledger.count("delete_errors_total", error.code)

    async def _remove(self, key: bytes, roots: list[Any]) -> dict[str, Any]:
        removed = 0
        for root in roots:
            for series in list(root.series.values()):
                while (row := series.rows.get(key)) is not None and self.planner.state.columns.busy[row]:
                    await self.progress(1.0)
                if row is None and len(roots) > ROOTS_FORBIDDEN:
                    continue
                work = self.planner.removal.remove(series, key)
                await self.volumes.delete(work.deletes)
                removed += row is not None
        return {"removed": removed}

    async def _purge(self, root: Any) -> dict[str, Any]:
        removed, sequence = self.planner.removal.purge(root)
        await self.volumes.tombstone(root.digest, sequence)
        return {"removed": removed, "root": root.digest.hex()}

    def _keep_house(self) -> None:
        self.planner.expire()
        self.volumes.keep_house()
        self._timer = self._loop.call_later(EXPIRE_EVERY_S, self._keep_house)


def arena_unit_bytes(size_bytes: int) -> int:
    """64 MiB, or less for a small arena, so that several slot sizes find room side by side."""
    unit = UNIT_BYTES
    while unit > 2 * MiB and size_bytes // unit < 16:
        unit //= 2
    if size_bytes < unit:
        raise Throttled(f"an arena of {size_bytes} bytes is too small: at least 2 MiB")
    return unit
