"""The arena, as the daemon holds it: one sealed memfd of payload and one of control entries, both mapped and paged in.

Only for the process that creates it. Clients get `fd` and `control_fd` over the socket and map them with
`kvstore.arena.ArenaMapping`; the seals keep them from resizing either and from writing the control page (not from
punching holes into the payload: everyone admitted to an arena is trusted with all of it).
Not covered: who uses which byte (kvstore.slab, planner), what generations mean (control.py).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.arena import futex, populate
from kvstore.arena.control import F_SEAL_FUTURE_WRITE, ControlViews, control_size, control_views
from kvstore.arena.ladder import HUGE_BYTES, HugePages, Memory, PageKind, check_size, obtain
from kvstore.arena.ladder import allocate as allocate_memfd
from kvstore.arena.ladder import fill as fill_memfd
from kvstore.arena.ladder import release as release_memory
from kvstore.errors import Closed, Full
from kvstore.units import format_size, round_up

ARENA_ID_BYTES = 16
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FREE_GENERATION = 1
"""Every entry at the start: odd, so no reader accepts a slot that was never published."""


class Arena:
    """Writable views of shared memory. Create it with `Arena.create`; close it once, at the end.

    Thread-safety: the views are plain memory (who writes where is the planner's business); `wake` may be called from
    any thread; `close` only when nobody uses the views or `address` any more. A forked child must not use it.
    """

    def __init__(self, memory: Memory, control_fd: int, control_mapping: mmap.mmap) -> None:
        """Takes ownership of everything passed in; used by `create`."""
        self.fd = memory.fd
        self.control_fd = control_fd
        self.size_bytes = len(memory.mapping)
        self.control_bytes = len(control_mapping)
        self.page_kind: PageKind = memory.page_kind
        self.notes: list[str] = memory.notes
        """Why a rung of the ladder was not taken, one sentence each."""
        self.arena_id = secrets.token_bytes(ARENA_ID_BYTES)
        self._data: memoryview | None = memoryview(memory.mapping)
        self._array = np.frombuffer(memory.mapping, np.uint8)
        self._control: ControlViews | None = control_views(control_mapping, self.size_bytes)
        self._control.generations.fill(FREE_GENERATION)
        self._parts_address = self._control.parts_address
        self.address: int = self._array.ctypes.data
        """Of the first payload byte; valid until `close`."""

    @classmethod
    def create(
        cls, size_bytes: int, huge_pages: HugePages = "auto", progress: populate.Progress | None = None
    ) -> Arena:
        """Get, seal and page in an arena of `size_bytes`, rounded up to 2 MiB. Blocks for seconds a GiB on cold memory.

        huge_pages: `auto` takes the best rung that works (`page_kind`, `notes`), `always` refuses 4 KiB pages, `never`
        wants them. progress: called with (bytes done, bytes in all) in this thread; what it raises ends the creation.
        Raises Full with one sentence where memory is too small, Invalid for a senseless size. Nothing stays open then.
        """
        check_size(size_bytes)
        size_bytes = round_up(size_bytes, HUGE_BYTES)
        memory = obtain(size_bytes, huge_pages, progress)
        try:
            populate.advise(memory.address, size_bytes, populate.DONTDUMP)
            fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
            control_fd, control_mapping = _create_control(control_size(size_bytes))
        except BaseException:
            release_memory(memory)
            raise
        return cls(memory, control_fd, control_mapping)

    @property
    def data(self) -> memoryview:
        """The whole payload, writable bytes. Raises Closed."""
        if self._data is None:
            raise Closed("the arena is closed")
        return self._data

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The same memory as `data`. Raises Closed."""
        if self._data is None:
            raise Closed("the arena is closed")
        return self._array

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        """One entry for each 4 KiB page, writable: control.py says in which order. Raises Closed."""
        return self._views().generations

    @property
    def parts_ready(self) -> npt.NDArray[np.uint32]:
        """One entry for each 4 KiB page, writable; follow a store by `wake` where somebody may wait. Raises Closed."""
        return self._views().parts_ready

    def wake(self, page: int) -> None:
        """Wake all who wait for parts_ready[page], in any process: a system call, measured 1.6 us when nobody waits."""
        if self._control is None:
            raise Closed("the arena is closed")
        futex.wake(self._parts_address + 4 * page)

    def close(self) -> None:
        """Close the descriptors and drop the views; the memory goes when the last view and the last client are gone."""
        if self._data is None:
            return
        self._data = self._control = None
        self._array = np.empty(0, np.uint8)
        self.address = 0
        os.close(self.fd)
        os.close(self.control_fd)
        self.fd = self.control_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _views(self) -> ControlViews:
        if self._control is None:
            raise Closed("the arena is closed")
        return self._control


def _create_control(size_bytes: int) -> tuple[int, mmap.mmap]:
    """Allocated, mapped writable here, then sealed so that nobody else ever maps it writable. Raises Full."""
    try:
        fd, mapping = allocate_memfd("kvstore-control", size_bytes)
    except OSError as error:
        raise Full(f"no memory for a control page of {format_size(size_bytes)}: {error.strerror}") from error
    try:
        fill_memfd(fd, mapping)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError as error:
        mapping.close()
        os.close(fd)
        raise Full(f"no control page of {format_size(size_bytes)} could be made: {error.strerror}") from error
    return fd, mapping
