"""Log lines whose number a peer cannot choose: a bound a kind, and a count of what was left out."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvstore.clock import Clock

LINES = 10
PERIOD_S = 10.0


@dataclass(slots=True)
class _Window:
    until_s: float
    lines: int = 0
    left_out: int = 0


class LimitedLog:
    """At most LINES lines of one kind in PERIOD_S; the first line of the next period says how many were left out.

    Kinds are literals in our code, never a peer's text, so that their number is bounded. Not thread-safe.
    """

    def __init__(self, logger: logging.Logger, clock: Clock) -> None:
        self._logger = logger
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def write(self, level: int, kind: str, text: str, *args: object, error: BaseException | None = None) -> None:
        """Log `text % args`, with the traceback of `error` where given, unless this kind has had its share."""
        now_s = self._clock.now()
        window = self._windows.get(kind)
        left_out = 0
        if window is None or now_s >= window.until_s:
            left_out = window.left_out if window is not None else 0
            window = self._windows[kind] = _Window(now_s + PERIOD_S)
        if window.lines == LINES:
            window.left_out += 1
            return
        window.lines += 1
        if left_out:
            text += f" (and {left_out} more lines of this kind before)"
        self._logger.log(level, text, *args, exc_info=error)
