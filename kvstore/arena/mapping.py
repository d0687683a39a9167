"""The arena, as a client maps it: payload writable, control page read-only, waiting for parts without an RPC.

Descriptors come from the daemon's Welcome. They are checked before a byte is touched: sizes that differ from what the
daemon said, or missing seals, would mean a SIGBUS in the engine later on.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.arena import futex, populate
from kvstore.arena.control import F_SEAL_FUTURE_WRITE, ControlViews, control_size, control_views
from kvstore.errors import Closed, Invalid
from kvstore.units import PAGE_BYTES, MiB

SPINS = 40
"""Looks before sleeping: 4 us (measured), a third of the sleep and wake-up that they may save."""
SLICE_S = 0.01
"""Longest sleep between two looks at the generation: bounds what a wake-up that came too early can cost, and what a
dead daemon's clients do not notice."""
_PREFAULT_BYTES = 16 * MiB
"""A call: the kernel holds the address space's lock meanwhile (3 ms on 4 KiB pages)."""
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ArenaMapping:
    """One mapped arena. Thread-safe; `close` may be called while other threads wait or hold views.

    Memory that was handed out stays mapped as long as a view of it lives (also a slice or a numpy array over it), even
    after `close`: keep `data` or `array` in a variable while you use `address`.
    A forked child may read and close its copy; whether it may trust what it reads is the client's fork guard's matter.
    """

    def __init__(self, fd: int, control_fd: int, arena_bytes: int, control_bytes: int, arena_id: bytes) -> None:
        """Map both. Takes ownership of the descriptors: they are closed when this returns or raises.

        Raises Invalid where sizes or seals are not as promised, OSError where the kernel refuses the mapping.
        """
        try:
            _check(fd, arena_bytes, _SIZE_SEALS, "arena")
            _check(control_fd, control_bytes, _SIZE_SEALS | F_SEAL_FUTURE_WRITE, "control page")
            if arena_bytes % PAGE_BYTES or control_bytes != control_size(arena_bytes):
                raise Invalid(f"a control page of {control_bytes} bytes does not fit an arena of {arena_bytes} bytes")
            mapping = mmap.mmap(fd, arena_bytes)
            control = mmap.mmap(control_fd, control_bytes, prot=mmap.PROT_READ)
        finally:
            for owned in (fd, control_fd):
                with suppress(OSError):  # EBADF: the caller's mistake is told above
                    os.close(owned)
        self.arena_id = arena_id
        self.arena_bytes = arena_bytes
        self._array = np.frombuffer(mapping, np.uint8)
        self._data: memoryview | None = memoryview(mapping)
        self._control: ControlViews | None = control_views(control, arena_bytes)
        self.address: int = self._array.ctypes.data
        """Of the first payload byte; valid as long as a view lives, 0 after `close`."""
        populate.advise(self.address, arena_bytes, populate.DONTDUMP)

    @property
    def closed(self) -> bool:
        return self._data is None

    @property
    def data(self) -> memoryview:
        """The whole payload, writable bytes. Raises Closed."""
        data = self._data
        if data is None:
            raise Closed("this arena is no longer mapped")
        return data

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The same memory as `data`. Raises Closed."""
        array = self._array
        if self._data is None:
            raise Closed("this arena is no longer mapped")
        return array

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        """READ-ONLY, one entry for each 4 KiB page; live memory. Raises Closed."""
        return self._views().generations

    @property
    def parts_ready(self) -> npt.NDArray[np.uint32]:
        """READ-ONLY, one entry for each 4 KiB page; live memory. Raises Closed."""
        return self._views().parts_ready

    def generation(self, page: int) -> int:
        """One entry as an int, three times as fast as `generations[page]`. Raises Closed."""
        return int(self._views().generation_words[page])

    def wait_parts(self, page: int, generation: int, parts: int, deadline_s: float) -> int:
        """Wait until at least `parts` parts of the slot at `page` may be read. Releases the GIL while it sleeps.

        deadline_s: on time.monotonic()'s scale; one in the past makes this a single look. Returns
        - a number >= parts: these parts are there (check the generation again after the copy);
        - FAILED: they will never come;
        - a number < parts: the deadline passed or `close` was called; 0 also when the generation is another one.
        Notices a wake-up in 13 us (measured), another generation or `close` within SLICE_S. Raises Closed.
        """
        views = self._views()  # keeps the memory mapped, whatever `close` does meanwhile
        ready, generations = views.parts_words, views.generation_words
        spins = SPINS
        while True:
            value = int(ready[page])
            if generations[page] != generation:
                return 0
            if value >= parts:
                return value
            if spins:
                spins -= 1
                continue
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._data is None:
                return value
            futex.wait(views.parts_address + 4 * page, value, min(left_s, SLICE_S))

    def prefault(self) -> None:
        """Page in the payload for this process, so that first copies do not fault: for a background thread.

        Measured: 0.08 s/GiB on 4 KiB pages. Ends early after `close`; does nothing before Linux 5.14.
        """
        views = (self.data, self._views())
        for start in range(0, self.arena_bytes, _PREFAULT_BYTES):
            address = self.address
            if self._data is None or address == 0:
                break
            try:
                size = min(_PREFAULT_BYTES, self.arena_bytes - start)
                populate.advise(address + start, size, populate.POPULATE_WRITE)
            except OSError:
                break  # only speed is lost: pages come in by faults as they are used
        del views

    def close(self) -> None:
        """Drop the mapping: at once, or when the last view of it dies. Idempotent."""
        self.address = 0
        self._data = self._control = None
        self._array = np.empty(0, np.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _views(self) -> ControlViews:
        views = self._control
        if views is None:
            raise Closed("this arena is no longer mapped")
        return views


def _check(fd: int, size_bytes: int, seals: int, what: str) -> None:
    """Raises Invalid unless `fd` is a memfd of exactly that size that can never shrink, with at least these seals."""
    try:
        have = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise Invalid(f"the descriptor of the {what} is no sealed shared memory: {error.strerror}") from error
    if have & seals != seals:
        raise Invalid(f"the {what} is not sealed as it must be (seals {have:#x}, needed {seals:#x})")
    if size != size_bytes or size_bytes < 1:
        raise Invalid(f"the {what} has {size} bytes, not the {size_bytes} that the daemon announced")
