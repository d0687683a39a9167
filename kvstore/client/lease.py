"""Leased chunks: read in place, without a copy; and pins.

The views are read-only memory of the arena. What is read through them counts only if `valid` says so afterwards: a
lease may expire or end with its session, and the slot may then hold another chunk.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvstore.arena import FAILED
from kvstore.client.link import Link
from kvstore.client.outcomes import loads
from kvstore.codes import Load
from kvstore.errors import Closed, KVStoreError
from kvstore.layout import SlotLayout
from kvstore.units import PAGE_BYTES
from kvstore.wire.messages import Leased, Message, Release, Renew, Unpin

WAIT_SLICE_S = 0.01
_WORD = struct.Struct("<Q")
Ask = Callable[[Link, Message], None]
"""Send a request over this link and wait for Done; raises KVStoreError."""


class LeaseView:
    """The answer to `Root.lease`: one code a key, and views of the hits. A context manager that releases.

    Thread-safe. Views outlive `release` as memory, never as truth: copy or use what they show before, then `valid`.
    """

    def __init__(self, layout: SlotLayout, leased: Leased, link: Link | None, ask: Ask) -> None:
        """`leased` has one answer a key that was asked for. Raises Closed where the arena is not mapped any more."""
        self._layout = layout
        self.packed = leased.codes
        """The codes as one byte a key."""
        self._link = link
        self._ask = ask
        self._lock = threading.Lock()
        self._lease = leased.lease
        self._leased = leased
        if link is not None and self._lease:
            self._mapping = link.mapping
            self._data = link.mapping.data  # keeps the memory mapped for as long as this object lives
            self._generations = link.mapping.generations

    @property
    def codes(self) -> list[Load]:
        """One a key, in the order asked for."""
        return loads(self.packed)

    @property
    def run(self) -> int:
        """Hits before the first miss."""
        return next((i for i, code in enumerate(self.packed) if code >= Load.MISS_UNKNOWN), len(self.packed))

    def view(self, i: int, *, shard: int = 0, part: int | None = None) -> memoryview:
        """Read-only bytes of chunk `i`: one shard, or one part of it. Empty where `i` is no hit.

        Of a chunk that is still being filled (SSD, REMOTE) only those parts mean anything that `wait` has confirmed.
        """
        if not self._hit(i):
            return memoryview(b"")
        offset = self._offset(i)
        if part is None:
            start, length = self._layout.shard_offsets[shard], self._layout.shard_bytes[shard]
        else:
            start, length = self._layout.part_ranges[shard][part]
        return self._data[offset + start : offset + start + length].toreadonly()

    def wait(self, i: int, part: int, timeout_s: float) -> bool:
        """Wait, without a request, until parts 0..part of chunk `i` may be read. False: not in time, or never."""
        if not self._hit(i) or self._link is None:
            return False
        need, page, generation = part + 1, self._offset(i) // PAGE_BYTES, self._generation(i)
        deadline_s = time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            try:
                value = self._mapping.wait_parts(page, generation, need, min(deadline_s, now_s + WAIT_SLICE_S))
            except Closed:  # the daemon is gone, and its arena was dropped
                return False
            if value >= need:
                return value != FAILED
            if now_s >= deadline_s or self._link.dead or not self.valid(i):
                return False

    def valid(self, i: int) -> bool:
        """Whether all that was read of chunk `i` until now was its own: to be asked after the last read."""
        return self._hit(i) and bool(self._generations[self._offset(i) // PAGE_BYTES] == self._generation(i))

    def renew(self) -> bool:
        """Start the lease's time again. False where it is over (or the daemon cannot be reached): release it."""
        if not self._lease or self._link is None:
            return False
        try:
            self._ask(self._link, Renew(self._lease))
        except KVStoreError:
            return False
        return True

    def release(self, *, copied_bytes: int = 0, seconds: float = 0.0) -> None:
        """Let the daemon evict them again; say what was loaded and how long it took. Idempotent, does not wait."""
        with self._lock:
            lease, self._lease = self._lease, 0
        if lease and self._link is not None:
            self._link.post(Release(lease, copied_bytes, seconds))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._lease and self._link is not None:  # no lock and no I/O here: this may run inside of anything
            self._link.owed.append(Release(self._lease))

    def _hit(self, i: int) -> bool:
        return self._leased.lease != 0 and self.packed[i] < Load.MISS_UNKNOWN

    def _offset(self, i: int) -> int:
        offset: int = _WORD.unpack_from(self._leased.offsets, 8 * i)[0]
        return offset

    def _generation(self, i: int) -> int:
        generation: int = _WORD.unpack_from(self._leased.generations, 8 * i)[0]
        return generation


class PinHandle:
    """Chunks kept in DRAM until `unpin`, the end of the session, or their time. Thread-safe."""

    def __init__(self, codes: bytes, lease: int, link: Link | None, ask: Ask) -> None:
        self._codes = codes
        self._lease = lease
        self._link = link
        self._ask = ask

    @property
    def codes(self) -> list[Load]:
        """One a key: a hit is pinned."""
        return loads(self._codes)

    def unpin(self) -> bool:
        """False where nothing was pinned any more, or the daemon cannot be reached. Idempotent."""
        lease, self._lease = self._lease, 0
        if not lease or self._link is None:
            return False
        try:
            self._ask(self._link, Unpin(lease))
        except KVStoreError:
            return False
        return True
