"""Which answer a caller gets, one a key: tables, what is checked before anything is sent, and counters.

Nothing here raises for bad input: an engine gets one answer a key, whatever it passed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeVar

from kvstore.client.connection import DeadlineMissed
from kvstore.codes import Ack, Load, Tier
from kvstore.errors import Closed, Full, Invalid, KVStoreError, Throttled
from kvstore.keys import KEY_BYTES

Item = TypeVar("Item")
UNANSWERED = 0
"""In codes under way: no answer yet. No code of the wire is 0."""
ACKS = {int(code): code for code in Ack}
LOADS = {int(code): code for code in Load}
TIERS = {int(tier): tier for tier in Tier}


def acks(codes: bytes | bytearray) -> list[Ack]:
    """A code of a newer daemon that is not known here counts as not reached."""
    return [ACKS.get(code, Ack.REFUSED_UNAVAILABLE) for code in codes]


def loads(codes: bytes | bytearray) -> list[Load]:
    return [LOADS.get(code, Load.MISS_UNAVAILABLE) for code in codes]


def load_for(error: KVStoreError) -> Load:
    """What the keys of a request that failed as a whole are answered."""
    if isinstance(error, DeadlineMissed):
        return Load.MISS_DEADLINE
    return {Invalid: Load.MISS_INVALID, Full: Load.MISS_FULL}.get(type(error), Load.MISS_UNAVAILABLE)


def ack_for(error: KVStoreError) -> Ack:
    codes = {
        Invalid: Ack.REFUSED_INVALID,
        Full: Ack.REFUSED_FULL,
        Throttled: Ack.REFUSED_BACKPRESSURE,
        Closed: Ack.REFUSED_CLOSED,
    }
    return codes.get(type(error), Ack.REFUSED_UNAVAILABLE)


def malformed(keys: Sequence[object]) -> set[int]:
    """Indexes of what is not 32 bytes of type bytes."""
    if {*map(type, keys)} <= {bytes} and {*map(len, keys)} <= {KEY_BYTES}:  # type: ignore[arg-type]
        return set()
    return {i for i, key in enumerate(keys) if type(key) is not bytes or len(key) != KEY_BYTES}


def repeated(keys: Sequence[object]) -> set[int]:
    """Indexes of well-formed keys that came before in the same batch."""
    try:
        if len(set(keys)) == len(keys):
            return set()
    except TypeError:  # something unhashable, which is malformed
        pass
    seen: set[bytes] = set()
    again = set()
    for i, key in enumerate(keys):
        if type(key) is bytes:
            if key in seen:
                again.add(i)
            seen.add(key)
    return again


class Counters:
    """What this client was answered. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def add_codes(self, prefix: str, codes: bytes | bytearray, names: dict[int, Load] | dict[int, Ack]) -> None:
        """One count a key, by the code's name: `load_dram`, `ack_refused_full`."""
        with self._lock:
            for code in set(codes):
                name = names.get(code)
                label = f"{prefix}_{name.name.lower() if name is not None else 'unknown'}"
                self._counts[label] = self._counts.get(label, 0) + codes.count(code)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(sorted(self._counts.items()))


class Selection:
    """The keys of a batch that are worth sending, and the way back from their answers to one answer a key."""

    def __init__(self, count: int, bad: set[int]) -> None:
        self.count = count
        self._places = [i for i in range(count) if i not in bad] if bad else None

    def __len__(self) -> int:
        return self.count if self._places is None else len(self._places)

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """The items of the selected keys."""
        return items if self._places is None else [items[i] for i in self._places]

    def spread(self, packed: bytes | bytearray, width_bytes: int = 1) -> bytearray:
        """Packed answers of the selected keys, as ones of all keys; zeros (UNANSWERED) for the others."""
        if self._places is None:
            return bytearray(packed)
        out = bytearray(self.count * width_bytes)
        for number, place in enumerate(self._places[: len(packed) // width_bytes]):
            start = number * width_bytes
            out[place * width_bytes : (place + 1) * width_bytes] = packed[start : start + width_bytes]
        return out


def settle(codes: bytearray, code: int, *, instead_of: int = UNANSWERED) -> None:
    """Give every key that has no answer this one."""
    if instead_of in codes:
        codes[:] = codes.replace(bytes([instead_of]), bytes([code]))
