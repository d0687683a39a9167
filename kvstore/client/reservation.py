"""Reserved slots: written in place, then committed."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvstore.client.link import Link
from kvstore.client.outcomes import Selection, ack_for, acks
from kvstore.codes import Ack
from kvstore.errors import KVStoreError
from kvstore.layout import SlotLayout
from kvstore.wire.messages import Abort, Commit, Committed, Reserved

_WORD = struct.Struct("<Q")
AskCommit = Callable[[Link, Commit], Committed]
"""Send over this link and wait for the answer; raises KVStoreError."""


class ReservationView:
    """The answer to `Root.reserve`: one code a key, and writable views where it is GRANTED.

    A context manager that aborts what was not committed. The caller's duty: every write through every view (and every
    copy that a device makes into it) has ended before `commit` or `abort`, and none starts after. An object that is
    dropped without either keeps its slots until the process ends, because nobody could know whether it still writes.
    Thread-safe, as long as one thread commits.
    """

    def __init__(
        self,
        layout: SlotLayout,
        shard: int,
        chosen: Selection,
        reserved: Reserved,
        link: Link | None,
        ask: AskCommit,
    ) -> None:
        """`reserved` has one answer a key that the caller named, the daemon knows only those of `chosen`.

        Raises Closed where the link's arena is no longer mapped.
        """
        self._layout = layout
        self._shard = shard
        self._chosen = chosen
        self.packed = reserved.codes
        """The codes as one byte a key."""
        self._reserved = reserved
        self._link = link
        self._ask = ask
        self._lock = threading.Lock()
        self._open = reserved.reservation != 0
        if self._open and link is not None:
            self._data = link.mapping.data  # keeps the memory mapped for as long as this object lives
            link.count_reservation(1)

    @property
    def codes(self) -> list[Ack]:
        """One a key, in the order asked for: GRANTED, EXISTS or REFUSED_*; after `commit` what that answered."""
        return acks(self.packed)

    def view(self, i: int) -> memoryview:
        """Writable bytes of the shard of chunk `i`. Empty where it was not granted, or after commit or abort."""
        if not self._open or self.packed[i] != Ack.GRANTED:
            return memoryview(b"")
        start = _WORD.unpack_from(self._reserved.offsets, 8 * i)[0] + self._layout.shard_offsets[self._shard]
        return self._data[start : start + self._layout.shard_bytes[self._shard]]

    def commit(self, *, durable: bool = False) -> list[Ack]:
        """Publish all that was granted; one answer a key. Only once; REFUSED_CLOSED after an abort or a reconnect."""
        if not self._take_open():
            return acks(self.packed)
        assert self._link is not None
        try:
            if self._link.dead:
                self._refuse(Ack.REFUSED_CLOSED)
                return acks(self.packed)
            message = Commit(self._reserved.reservation, 0, len(self._chosen), durable)
            codes = self._chosen.spread(self._ask(self._link, message).codes)
            if len(codes) == len(self.packed):  # keys that were not sent keep their answer
                self.packed = bytes(new or old for new, old in zip(codes, self.packed, strict=True))
            self._refuse(Ack.REFUSED_UNAVAILABLE)
        except KVStoreError as error:
            self._refuse(ack_for(error))
            self._link.post(Abort(self._reserved.reservation))
        finally:
            self._link.count_reservation(-1)
        return acks(self.packed)

    def abort(self) -> None:
        """Give back what was granted. Idempotent, does not wait."""
        if not self._take_open():
            return
        assert self._link is not None
        self._refuse(Ack.REFUSED_CLOSED)
        self._link.post(Abort(self._reserved.reservation))
        self._link.count_reservation(-1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _take_open(self) -> bool:
        with self._lock:
            was, self._open = self._open, False
        return was

    def _refuse(self, code: Ack) -> None:
        """What is still GRANTED will not be stored."""
        self.packed = self.packed.replace(bytes([Ack.GRANTED]), bytes([code]))
