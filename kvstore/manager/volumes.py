"""What SSD volumes need besides reads and writes: recovery, free-space floor, writing ahead, tombstones, deletes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvstore.errors import Full, KVStoreError, Unavailable
from kvstore.index import Root, ssd_location
from kvstore.manager.settings import ManagerSettings
from kvstore.planner import Delete, Planner, Write
from kvstore.slotted import SlottedVolume
from kvstore.transfer import Chore, Transfer
from kvstore.units import PAGE_BYTES

FAILURES_TO_REST = 3
"""Failed device writes in a row after which a volume gets none for REST_S: stores go to the others, or stay in DRAM."""
REST_S = 30.0
PREWRITTEN_AHEAD = 8
"""Free units kept written once, so that a burst of stores meets no unwritten extent (0.68x of recycled speed)."""
_LOG = logging.getLogger("kvstore.volumes")


class Volumes:
    def __init__(
        self,
        volumes: Sequence[SlottedVolume],
        planner: Planner,
        transfer: Transfer,
        loop: asyncio.AbstractEventLoop,
        settings: ManagerSettings,
    ) -> None:
        self.all = list(volumes)
        self.settings = settings
        self.spaces: list[tuple[int, int]] = [(0, 0)] * len(self.all)
        """(bytes allocated, bytes free on the file system) as of the last look."""
        self.states = ["ok"] * len(self.all)
        self.recovered_chunks = 0
        self._failures = [0] * len(self.all)
        self._rest_until_s = [0.0] * len(self.all)
        self._planner, self._transfer, self._loop = planner, transfer, loop
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._looking = False
        self._prewriting = False
        self._quiet_rounds = 0

    async def recover(self) -> None:
        """Bring back what each volume holds. One that cannot be read now is left out, and `states` says so."""
        for number, volume in enumerate(self.all):
            try:
                loaded = await self._call(volume.load)
            except (Unavailable, Full) as error:
                self._lose(number, f"not recovered: {error}")
                continue
            slab, book = self._planner.state.ssd.slabs[number], self._transfer.books[number]
            for first_unit, stride in loaded.segments:
                book.adopt(first_unit, slab.units_for(stride), stride)
            self.recovered_chunks += self._planner.recovery.restore(number, loaded)
            if loaded.rebuilt:
                _LOG.warning("volume %s: index lost, rebuilt from %d records", volume.path, len(loaded.place))
            self._retire(number)
        self._planner.recovery.relink()
        await self._look()

    def close(self) -> None:
        for volume in self.all:
            volume.close()

    def note_root(self, root: Root) -> None:
        """Remember what a root stands for; a failure costs only its description."""
        for volume in self.all:
            self._transfer.store([Chore(partial(volume.note_root, root.digest, root.description))])

    async def tombstone(self, root: bytes, sequence: int) -> None:
        """Durable on return. Raises what the volumes raise, after all of them were tried."""
        await self._all([partial(volume.tombstone, root, sequence) for volume in self.all])

    async def delete(self, deletes: Sequence[Delete]) -> None:
        """Durable on return; then the places are free."""
        for delete in deletes:
            await self._call(partial(self.all[delete.volume].delete, [delete.item]))
            self._planner.removal.deleted(ssd_location(delete.volume, delete.item.place))

    def troubled(self, write: Write, error: KVStoreError) -> None:
        """A write failed. A full disk stops growth until the next look; a read-only one stops writes for good."""
        number, first_unit = write.volume, write.segment[0]
        slab = self._planner.state.ssd.slabs[number]
        if isinstance(error, Full):
            slab.may_take = 0
            if not self._transfer.books[number].knows(first_unit):
                slab.unback(first_unit)
        else:
            self._failures[number] += 1
        self._retire(number)
        if self.all[number].read_only and self.states[number] == "ok":
            self._lose(number, "read-only: it serves what it has and takes nothing new")

    def worked(self, number: int) -> None:
        """A write succeeded."""
        self._failures[number] = 0

    def rest(self, number: int, error: KVStoreError) -> None:
        """After a device write with failures: give a volume that keeps failing a rest, then one more try."""
        if self._failures[number] >= FAILURES_TO_REST and self.states[number] == "ok":
            self._lose(number, f"failing: {error}")
            self._rest_until_s[number] = self._planner.state.clock.now() + REST_S

    def _resume(self) -> None:
        now_s = self._planner.state.clock.now()
        for number, until_s in enumerate(self._rest_until_s):
            if 0 < until_s <= now_s and self.states[number].startswith("failing"):
                self._rest_until_s[number], self._failures[number] = 0.0, FAILURES_TO_REST - 1
                self.states[number] = "ok"
                self._planner.state.ssd.usable[number] = True

    def _lose(self, number: int, state: str) -> None:
        """Nothing is written to this volume from now on."""
        self.states[number] = state
        self._planner.state.ssd.usable[number] = False
        _LOG.error("volume %s is %s", self.all[number].path, state)

    def _retire(self, number: int) -> None:
        for unit in self.all[number].abandoned:
            self._planner.state.ssd.slabs[number].retire(unit)

    def finished(self, job: Chore) -> None:
        """A chore came back (from Manager's completions)."""
        future = self._waiting.pop(id(job), None)
        if future is None or future.done():
            if job.error is not None:
                self._planner.state.ledger.count("chore_errors_total", job.error.code)
        elif job.error is not None:
            future.set_exception(job.error)
        else:
            future.set_result(job.result)

    def keep_house(self) -> None:
        """Once a second: look at free space; write a free unit for the first time when nothing else is to do."""
        self._resume()
        if self.all and not self._looking:
            self._looking = True
            task = self._loop.create_task(self._look())
            task.add_done_callback(self._looked)
        busy = self._transfer.queued_loads or self._transfer.queued_stores
        self._quiet_rounds = 0 if busy else self._quiet_rounds + 1
        if self._quiet_rounds >= 2 and not self._prewriting:
            self._prewrite_one()

    async def _look(self) -> None:
        """How much room the disk has for new units, those counted that are taken and not yet allocated."""
        for number, volume in enumerate(self.all):
            if self.states[number] != "ok":
                continue  # of a resting volume the next try decides
            try:
                self.spaces[number] = await self._call(volume.space)
            except Unavailable as error:
                self._lose(number, f"lost: {error}")
                continue
            slab, book = self._planner.state.ssd.slabs[number], self._transfer.books[number]
            room = self.spaces[number][1] - self.settings.free_space_floor_bytes
            waiting = sum(s.units for s in slab.segments() if not s.unbacked and not book.knows(s.first_unit))
            slab.may_take = max(0, room // volume.unit_bytes - waiting)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking = False
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("cannot look at the volumes' free space: %s", error)

    def _prewrite_one(self) -> None:
        """The unit is hidden from stores meanwhile, so the last free one is left alone: a store may need it now."""
        space = self._planner.state.ssd
        for number, volume in enumerate(self.all):
            slab = space.slabs[number]
            free = slab.free_units()
            unit = next((u for u in free[:PREWRITTEN_AHEAD] if not volume.prewritten(u)), None)
            if unit is None or len(free) < 2 or not slab.grows(PAGE_BYTES) or not space.usable[number]:
                continue
            if slab.hide_unit(unit):
                self._prewriting = True
                task = self._loop.create_task(self._prewrite(number, unit))
                task.add_done_callback(self._prewrote)
                return

    async def _prewrite(self, number: int, unit: int) -> None:
        try:
            await self._call(partial(self._transfer.books[number].prewrite, self.all[number], unit))
        finally:
            self._planner.state.ssd.slabs[number].show_unit(unit)

    def _prewrote(self, task: asyncio.Task[None]) -> None:
        self._prewriting = False
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.warning("a free segment could not be written ahead: %s", error)
            self._quiet_rounds = -60

    async def _all(self, calls: Sequence[Any]) -> None:
        results = await asyncio.gather(*(self._call(call) for call in calls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _call(self, call: Any) -> Any:
        """Run a blocking call of a volume on an I/O thread."""
        job = Chore(call)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[id(job)] = future
        self._transfer.store([job])
        return await future
