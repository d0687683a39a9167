"""The one broad guard of all connectors: our mistakes cost the engine a cache hit, never a request or the process.

An engine calls hooks from its scheduler and worker loops, where an exception ends the engine. What is caught here is a
defect of ours (every failure of the world is a value already): it is logged once a place with its trace, and counted.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
MAX_TRACES = 3
"""Traces logged for each place; a defect in a hook that runs every step would fill the disk."""


class Guard:
    """Thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self.failures: Counter[str] = Counter()
        """Exceptions caught, by place."""

    def run(self, place: str, fallback: Result, action: Callable[[], Result]) -> Result:
        """What `action` returns, or `fallback` where it raised. KeyboardInterrupt and SystemExit go through."""
        try:
            return action()
        except Exception:  # noqa: BLE001  the one place, see the module's docstring
            with self._lock:
                self.failures[place] += 1
                count = self.failures[place]
            if count <= MAX_TRACES:
                # As text: a record with the exception itself keeps its frames, and so the arena, wherever it is kept.
                trace = traceback.format_exc()
                self._logger.error("%s failed; it counts as a miss (failure %d of this kind)\n%s", place, count, trace)
            return fallback

    @property
    def total(self) -> int:
        with self._lock:
            return sum(self.failures.values())
