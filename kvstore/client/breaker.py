"""The circuit breaker between an engine and a daemon that does not answer: one missed deadline, then none.

    closed --missed deadline--> open --hold is over: one probe--> half open --probe answered--> closed

While it is not closed every call is a miss at once. Only the background thread probes, so no engine thread ever pays
for finding out. A daemon that answers probes but soon misses deadlines again makes each hold twice as long as the last.
Pure: time comes in as a parameter. Not thread-safe: the caller locks, except for reading `closed`.
"""

from __future__ import annotations

from enum import StrEnum

MIN_HOLD_S = 0.02
MAX_HOLD_S = 5.0
FORGET_HOLDS = 20
"""A failure later than so many holds after closing is a new story, and starts with the shortest hold again."""


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    def __init__(self) -> None:
        self.state = State.CLOSED
        self.closed = True
        """Whether calls may go through: `state is CLOSED`, for a reader in a hurry."""
        self.opened_total = 0
        self._hold_s = 0.0
        self._probe_at_s = 0.0
        self._closed_at_s = float("-inf")

    def fail(self, now_s: float) -> bool:
        """A deadline was missed. Returns whether this opened the breaker (False: it was not closed)."""
        if self.state is not State.CLOSED:
            return False
        again = now_s - self._closed_at_s < FORGET_HOLDS * self._hold_s
        self._hold_s = min(MAX_HOLD_S, 2 * self._hold_s) if again else MIN_HOLD_S
        self._probe_at_s = now_s + self._hold_s
        self.opened_total += 1
        self.closed = False
        self.state = State.OPEN
        return True

    def probe_in_s(self, now_s: float) -> float | None:
        """Seconds until a probe is due (0: now); None where none is wanted."""
        return max(0.0, self._probe_at_s - now_s) if self.state is State.OPEN else None

    def probe_sent(self) -> None:
        """The one probe is under way: it stays so until it is answered or the connection ends."""
        if self.state is State.OPEN:
            self.state = State.HALF_OPEN

    def succeed(self, now_s: float) -> bool:
        """The daemon answered a probe. Returns whether this closed the breaker."""
        if self.state is not State.HALF_OPEN:
            return False
        self._closed_at_s = now_s
        self.state = State.CLOSED
        self.closed = True
        return True

    def reset(self) -> None:
        """Another daemon process: nothing that was known of the old one counts."""
        self._hold_s = 0.0
        self._closed_at_s = float("-inf")
        self.state = State.CLOSED
        self.closed = True
