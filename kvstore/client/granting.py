"""What lies in place: the requests behind lease, pin and reserve, with one answer a key whatever the keys are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from kvstore.client.caller import Caller
from kvstore.client.lease import LeaseView, PinHandle
from kvstore.client.loading import Call, check_answer, check_slots
from kvstore.client.outcomes import Selection, ack_for, load_for, malformed, repeated, settle
from kvstore.client.reservation import ReservationView
from kvstore.codes import Ack, Load
from kvstore.errors import KVStoreError
from kvstore.keys import chain_parents
from kvstore.layout import SlotLayout
from kvstore.wire.messages import MAX_KEYS, Lease, Leased, Pin, Reserve, Reserved

_FIRST_MISS = int(Load.MISS_UNKNOWN)
OpenCall = Callable[[], AbstractContextManager[Call]]
"""Root._call."""


def grant_lease(
    caller: Caller, open_call: OpenCall, layout: SlotLayout, pool: int, keys: Sequence[bytes], layerwise: bool
) -> LeaseView:
    answers = _Answers(keys, malformed(keys), Load.MISS_INVALID, Load.MISS_FULL)
    try:
        with open_call() as call:
            request = Lease(call.root, pool, answers.asked(keys), layerwise)
            leased = call.ask(request, Leased)
            check_answer(call, leased.codes, leased.offsets, answers.sent)
            check_answer(call, leased.codes, leased.generations, answers.sent)
            if answers.sent == len(keys) and max(leased.codes, default=_FIRST_MISS) < _FIRST_MISS:
                check_slots(call, np.frombuffer(leased.offsets, "<i8"), layout.slot_bytes)
                return LeaseView(layout, leased, call.link, caller.ask)
            hits = np.frombuffer(leased.codes, np.uint8) < _FIRST_MISS
            check_slots(call, np.frombuffer(leased.offsets, "<i8")[hits], layout.slot_bytes)
            codes = answers.whole(leased.codes, Load.MISS_UNAVAILABLE)
            words = answers.words(leased.offsets), answers.words(leased.generations)
            return LeaseView(layout, Leased(leased.lease, codes, *words), call.link, caller.ask)
    except KVStoreError as error:
        codes = answers.whole(b"", load_for(error))
        return LeaseView(layout, Leased(0, codes, b"", b""), None, caller.ask)


def grant_pin(caller: Caller, open_call: OpenCall, pool: int, keys: Sequence[bytes], ttl_s: float) -> PinHandle:
    answers = _Answers(keys, malformed(keys), Load.MISS_INVALID, Load.MISS_FULL)
    try:
        with open_call() as call:
            request = Pin(call.root, pool, answers.asked(keys), ttl_s)
            pinned = call.ask(request, Leased)
            codes = answers.whole(pinned.codes, Load.MISS_UNAVAILABLE)
            return PinHandle(codes, pinned.lease, call.link, caller.ask)
    except KVStoreError as error:
        return PinHandle(answers.whole(b"", load_for(error)), 0, None, caller.ask)


def grant_reservation(
    caller: Caller,
    open_call: OpenCall,
    layout: SlotLayout,
    pool: int,
    keys: Sequence[bytes],
    parents: Sequence[bytes] | None,
    shard: int,
) -> ReservationView:
    above = chain_parents(keys) if parents is None else parents
    bad = malformed(keys) | repeated(keys) | malformed(above) | set(range(len(above), len(keys)))
    if not 0 <= shard < layout.shards:
        bad, shard = set(range(len(keys))), 0
    answers = _Answers(keys, bad, Ack.REFUSED_INVALID, Ack.REFUSED_FULL)
    try:
        with open_call() as call:
            request = Reserve(call.root, pool, shard, answers.asked(keys), answers.asked(above))
            reserved = call.ask(request, Reserved)
            check_answer(call, reserved.codes, reserved.offsets, answers.sent)
            granted = np.frombuffer(reserved.codes, np.uint8) == int(Ack.GRANTED)
            check_slots(call, np.frombuffer(reserved.offsets, "<i8")[granted], layout.slot_bytes)
            whole = Reserved(
                reserved.reservation,
                answers.whole(reserved.codes, Ack.REFUSED_UNAVAILABLE),
                answers.words(reserved.offsets),
            )
            return ReservationView(layout, shard, answers.chosen, whole, call.link, caller.commit)
    except KVStoreError as error:
        refused = Reserved(0, answers.whole(b"", ack_for(error)), b"")
        return ReservationView(layout, shard, answers.chosen, refused, None, caller.commit)


class _Answers:
    """One code a key: what is known before anything is sent, then what the daemon says."""

    def __init__(self, keys: Sequence[bytes], bad: set[int], invalid: int, full: int) -> None:
        good = [i for i in range(len(keys)) if i not in bad] if bad else range(len(keys))
        excess = set(good[MAX_KEYS:])
        self._known = bytearray(len(keys))
        for i in bad:
            if i < len(keys):
                self._known[i] = invalid
        for i in excess:
            self._known[i] = full
        self.chosen = Selection(len(keys), bad | excess)
        self.sent = len(self.chosen)

    def asked(self, keys: Sequence[bytes]) -> bytes:
        return b"".join(self.chosen.of(keys))

    def whole(self, packed: bytes, otherwise: int) -> bytes:
        """`packed` answers what was sent; what it does not reach is answered `otherwise`."""
        codes = self.chosen.spread(packed[: self.sent].ljust(self.sent, bytes([otherwise])))
        if any(self._known):
            codes = bytearray(known or code for known, code in zip(self._known, codes, strict=True))
        settle(codes, otherwise)
        return bytes(codes)

    def words(self, packed: bytes) -> bytes:
        return bytes(self.chosen.spread(packed, 8))
