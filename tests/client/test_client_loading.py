"""One sub-batch of batch_get over a real arena, whose daemon is this test: what is torn, late or failed is a miss.

Wrong bytes can only come about between a lease's answer and the end of the copy, a window that a test of whole
processes hardly ever hits; here the test itself takes slots away in it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from client_tools import Bytes, Peer, empty

from kvstore.arena import FAILED, Arena, ArenaMapping
from kvstore.client.connection import Connection
from kvstore.client.copying import Buffers, Copier, Target
from kvstore.client.link import Link
from kvstore.client.loading import Call, Shape, load
from kvstore.client.outcomes import loads
from kvstore.codes import Load
from kvstore.errors import KVStoreError, Unavailable
from kvstore.units import PAGE_BYTES, KiB, MiB
from kvstore.wire.messages import Lease, Leased, Release, Welcome

SLOT_BYTES = 64 * KiB
SLOTS = 4
PARTS = 3
SHAPE = Shape(pool=0, offset_bytes=0, size_bytes=SLOT_BYTES, parts=PARTS, slot_bytes=SLOT_BYTES)
KEYS = [bytes([i]) * 32 for i in range(SLOTS)]


@dataclass
class Rig:
    arena: Arena
    call: Call
    peer: Peer

    def fill(self, slot: int, parts: int = PARTS, generation: int = 2) -> None:
        start = slot * SLOT_BYTES
        self.arena.array[start : start + SLOT_BYTES] = slot + 1
        self.arena.parts_ready[self.page(slot)] = parts
        self.arena.generations[self.page(slot)] = generation
        self.arena.wake(self.page(slot))

    def page(self, slot: int) -> int:
        return slot * SLOT_BYTES // PAGE_BYTES

    def take_away(self, slot: int) -> None:
        """As the daemon does it: odd generation first, then somebody else's bytes."""
        self.arena.generations[self.page(slot)] += 1
        self.arena.parts_ready[self.page(slot)] = 0
        self.arena.wake(self.page(slot))
        self.arena.array[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = 0xEE

    def load(
        self,
        codes: Sequence[Load],
        *,
        copier: Copier | None = None,
        within_s: float = 2.0,
        generations: Sequence[int] = (2,) * SLOTS,
        offsets: Sequence[int] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[list[Load], list[Bytes]]:
        """Ask for all slots; the answer is `codes`, after which `meanwhile` runs in a thread of its own."""
        out = empty(SLOTS, SLOT_BYTES)
        offsets = offsets or [slot * SLOT_BYTES for slot in range(SLOTS)]
        leased = Leased(5, bytes(codes), np.array(offsets, "<u8").tobytes(), np.array(generations, "<u8").tobytes())

        def answer() -> None:
            ((number, message),) = self.peer.receive(1)
            assert message == Lease(1, 0, b"".join(KEYS))
            self.peer.answer((number, leased))
            meanwhile()

        thread = threading.Thread(target=answer)
        thread.start()
        self.call.fills_until_s = time.monotonic() + within_s
        packed = bytearray(SLOTS)
        targets = Buffers(out, SLOT_BYTES, writable=True).targets
        try:
            load(self.call, SHAPE, KEYS, targets, copier or Copier(1), packed)
        except KVStoreError:
            assert not any(packed), "an error leaves no answer that could be taken for a hit"
            raise
        finally:
            thread.join()
        return loads(packed), out


@pytest.fixture
def rig() -> Iterator[Rig]:
    arena = Arena.create(2 * MiB, "never")
    mapping = ArenaMapping(
        os.dup(arena.fd), os.dup(arena.control_fd), arena.size_bytes, arena.control_bytes, arena.arena_id
    )
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)
    connection = Connection(ours)
    welcome = Welcome(1, arena.arena_id, arena.size_bytes, arena.control_bytes, "4KiB")
    link = Link(welcome, mapping, lambda _: connection)
    yield Rig(
        arena, Call(link, connection, 1, patience_s=2.0, fills_until_s=0.0, copies_until_s=float("inf")), Peer(theirs)
    )
    connection.close()
    theirs.close()
    mapping.close()
    arena.close()


class ThenTakeAway(Copier):
    """A real copier with a daemon behind it that takes slots away as soon as they are copied."""

    def __init__(self, rig: Rig, slots: Sequence[int]) -> None:
        super().__init__(1)
        self._rig = rig
        self._slots = slots

    def fill_targets(self, slots: Sequence[int], targets: Sequence[Target], size_bytes: int, deadline_s: float) -> int:
        done = super().fill_targets(slots, targets, size_bytes, deadline_s)
        for slot in self._slots:
            self._rig.take_away(slot)
        return done


def test_what_is_resident_is_copied_and_the_lease_reports_how_much(rig: Rig) -> None:
    for slot in range(SLOTS):
        rig.fill(slot)
    codes, out = rig.load([Load.DRAM] * 3 + [Load.MISS_UNKNOWN])
    assert codes == [Load.DRAM] * 3 + [Load.MISS_UNKNOWN]
    assert [int(buffer[-1]) for buffer in out] == [1, 2, 3, 0]
    ((_, release),) = rig.peer.receive(1)
    assert isinstance(release, Release)
    assert (release.lease, release.copied_bytes) == (5, 3 * SLOT_BYTES)
    assert release.seconds > 0


def test_a_torn_copy_is_a_miss(rig: Rig) -> None:
    for slot in range(SLOTS):
        rig.fill(slot)
    codes, _ = rig.load([Load.DRAM] * SLOTS, copier=ThenTakeAway(rig, [1, 3]))
    assert codes == [Load.DRAM, Load.MISS_STALE, Load.DRAM, Load.MISS_STALE]
    ((_, release),) = rig.peer.receive(1)
    assert isinstance(release, Release)
    assert release.copied_bytes == 2 * SLOT_BYTES


def test_a_slot_that_was_taken_over_before_the_copy_is_a_miss_and_not_copied(rig: Rig) -> None:
    for slot in range(SLOTS):
        rig.fill(slot, generation=4 if slot == 2 else 2)
    codes, out = rig.load([Load.DRAM] * SLOTS)
    assert codes == [Load.DRAM, Load.DRAM, Load.MISS_STALE, Load.DRAM]
    assert not out[2].any()


def test_chunks_are_copied_as_they_become_ready_in_any_order(rig: Rig) -> None:
    for slot in range(SLOTS):
        rig.fill(slot, parts=PARTS if slot == 1 else 0)

    def fills() -> None:
        for slot in (3, 0, 2):
            time.sleep(0.02)
            rig.fill(slot, parts=1)
            rig.fill(slot)

    codes, out = rig.load([Load.SSD, Load.DRAM, Load.SSD, Load.SSD], meanwhile=fills)
    assert codes == [Load.SSD, Load.DRAM, Load.SSD, Load.SSD]
    assert [int(buffer[0]) for buffer in out] == [1, 2, 3, 4]


def test_a_failed_fill_is_a_miss_and_the_others_come(rig: Rig) -> None:
    for slot in range(SLOTS):
        rig.fill(slot, parts=0)

    def fills() -> None:
        rig.fill(0)
        rig.fill(1, parts=FAILED)
        rig.fill(2)
        rig.fill(3)

    codes, out = rig.load([Load.SSD] * SLOTS, meanwhile=fills)
    assert codes == [Load.SSD, Load.MISS_IO, Load.SSD, Load.SSD]
    assert not out[1].any()


def test_a_fill_that_does_not_come_in_time_is_a_miss_at_the_deadline(rig: Rig) -> None:
    for slot in range(SLOTS):
        rig.fill(slot, parts=PARTS if slot == 0 else PARTS - 1)
    start_s = time.monotonic()
    codes, out = rig.load([Load.SSD] * SLOTS, within_s=0.1)
    assert 0.1 <= time.monotonic() - start_s < 0.25
    assert codes == [Load.SSD, *[Load.MISS_DEADLINE] * 3]
    assert not out[1].any()


def test_a_slot_that_is_taken_away_while_it_is_awaited_is_a_miss_at_once(rig: Rig) -> None:
    for slot in range(SLOTS):
        rig.fill(slot, parts=0)

    def steals() -> None:
        time.sleep(0.02)
        rig.take_away(0)
        for slot in (1, 2, 3):
            rig.fill(slot)

    start_s = time.monotonic()
    codes, _ = rig.load([Load.SSD] * SLOTS, within_s=5.0, meanwhile=steals)
    assert codes == [Load.MISS_STALE, Load.SSD, Load.SSD, Load.SSD]
    assert time.monotonic() - start_s < 1.0


def test_the_end_of_the_link_ends_the_waiting(rig: Rig) -> None:
    for slot in range(SLOTS):
        rig.fill(slot, parts=PARTS if slot == 0 else 0)

    def dies() -> None:
        time.sleep(0.02)
        rig.call.link.die("test")

    start_s = time.monotonic()
    codes, out = rig.load([Load.DRAM] + [Load.SSD] * 3, within_s=10.0, meanwhile=dies)
    assert time.monotonic() - start_s < 0.1
    assert codes == [Load.DRAM] + [Load.MISS_UNAVAILABLE] * 3
    assert int(out[0][0]) == 1


def test_an_arena_that_is_dropped_under_a_waiting_get_leaves_what_was_copied(rig: Rig) -> None:
    """The background thread unmaps as soon as the daemon is gone, whatever other threads are doing."""
    for slot in range(SLOTS):
        rig.fill(slot, parts=PARTS if slot == 0 else 0)

    def drops() -> None:
        time.sleep(0.02)
        rig.call.link.die("test")
        rig.call.link.mapping.close()

    codes, out = rig.load([Load.DRAM] + [Load.SSD] * 3, within_s=10.0, meanwhile=drops)
    assert codes == [Load.DRAM] + [Load.MISS_UNAVAILABLE] * 3
    assert int(out[0][0]) == 1


@pytest.mark.parametrize("offset", [2 * MiB, 2 * MiB - SLOT_BYTES + PAGE_BYTES, 1 << 63, 1])
def test_an_offset_outside_of_the_arena_is_never_used(rig: Rig, offset: int) -> None:
    for slot in range(SLOTS):
        rig.fill(slot)
    with pytest.raises(Unavailable, match="outside"):
        rig.load([Load.DRAM] * SLOTS, offsets=[0, offset, 0, 0])
    assert rig.call.connection.broken


def test_an_answer_of_another_length_is_never_used(rig: Rig) -> None:
    with pytest.raises(Unavailable, match="fit"):
        rig.load([Load.DRAM] * 3)
    assert rig.call.connection.broken
