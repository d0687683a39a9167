"""Counters by (name, label) and a bounded ledger of the last events, for `status`, `stat`, metrics and `explain`.

Names follow Prometheus' conventions without the `kvstore_` prefix: `evictions_total`, label = reason name.
Not thread-safe: owned by the loop; threads return values and the loop counts them.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

LEDGER_EVENTS = 4096
"""Events kept: enough for the minutes before a question, 1 MiB at most."""


class Event(NamedTuple):
    """One thing that happened to one chunk."""

    at_s: float
    what: str
    """`refused`, `evicted`, `dropped`, `missed`, `quarantined`, `removed`."""
    reason: str
    tier: str
    root: bytes
    key: bytes


class Ledger:
    def __init__(self, events: int = LEDGER_EVENTS) -> None:
        self._counters: dict[tuple[str, str], float] = {}
        self._events: deque[Event] = deque(maxlen=events)

    def count(self, name: str, label: str = "", amount: float = 1) -> None:
        key = (name, label)
        self._counters[key] = self._counters.get(key, 0) + amount

    def record(self, event: Event) -> None:
        self._events.append(event)

    def value(self, name: str, label: str | None = None) -> float:
        """One counter, or the sum over its labels when `label` is None."""
        if label is not None:
            return self._counters.get((name, label), 0)
        return sum(v for (n, _), v in self._counters.items() if n == name)

    def snapshot(self) -> dict[str, dict[str, float]]:
        """{name: {label: value}}; the label of an unlabelled counter is the empty string."""
        out: dict[str, dict[str, float]] = {}
        for (name, label), value in sorted(self._counters.items()):
            out.setdefault(name, {})[label] = value
        return out

    def events(self, key: bytes | None = None) -> list[Event]:
        """The last events, oldest first, of all chunks or of one key."""
        return [e for e in self._events if key is None or e.key == key]
