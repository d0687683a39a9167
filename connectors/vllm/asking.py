"""The scheduler's questions to the daemon: asked by a helper thread, so that a step never waits for a frozen daemon.

An answer is a lease: the chunks stay in DRAM, and those on SSD are being read, while the request waits for blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from kvstore.client.lease import LeaseView
from kvstore.client.root import Root
from kvstore.codes import Load

STEP_WAIT_S = 0.001
"""A step waits this long in all for answers: most come within 0.1 ms, and one more engine step costs more."""
FRESH_S = 5.0
"""A lease lives for 30 s on a default daemon; a request that waits longer than this for blocks asks again."""


@dataclass(slots=True)
class Inquiry:
    """One question; `take` or `drop` it."""

    first_chunk: int
    """The chunk of the chain that the question starts with."""
    asked_at_s: float
    future: Future[LeaseView]


@dataclass(slots=True)
class Answer:
    """`chunks` leading chunks of the question can be loaded; `lease` keeps them."""

    first_chunk: int
    chunks: int
    resident: int
    """Of those, how many were in DRAM."""
    asked_at_s: float
    lease: LeaseView


class Asker:
    """Hooks are called by one thread."""

    def __init__(self, clock: Callable[[], float], timeout_s: float) -> None:
        """clock: seconds, monotonic. timeout_s: an answer that takes longer is a miss."""
        self._clock = clock
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(1, "kvstore-ask")
        self._budget_s = STEP_WAIT_S

    def new_step(self) -> None:
        self._budget_s = STEP_WAIT_S

    def ask(self, root: Callable[[], Root], first_chunk: int, keys: tuple[bytes, ...]) -> Inquiry:
        return Inquiry(first_chunk, self._clock(), self._pool.submit(lambda: root().lease(keys)))

    def poll(self, inquiry: Inquiry) -> Answer | bool | None:
        """An answer, None where it is still under way, False where it took too long (it is dropped then).

        Raises what went wrong in the helper thread: a defect of ours, never the daemon's.
        """
        future = inquiry.future
        if not future.done() and self._budget_s > 0:
            started_s = self._clock()
            with contextlib.suppress(FutureTimeout):
                future.exception(self._budget_s)
            self._budget_s -= self._clock() - started_s
        if not future.done():
            if self._clock() - inquiry.asked_at_s < self._timeout_s:
                return None
            self.drop(inquiry)
            return False
        lease = future.result()
        run = lease.run
        if not run:
            lease.release()
        resident = sum(code == Load.DRAM for code in lease.codes[:run])
        return Answer(inquiry.first_chunk, run, resident, inquiry.asked_at_s, lease)

    def drop(self, inquiry: Inquiry) -> None:
        """Nobody wants the answer: whatever comes is released."""
        inquiry.future.add_done_callback(_release)

    def fresh(self, answer: Answer) -> bool:
        return self._clock() - answer.asked_at_s < FRESH_S

    def close(self) -> None:
        """Waits for the question under way (the client's deadline). Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _release(future: Future[LeaseView]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()
