"""SSD write budget: bytes a second with a burst of ten seconds, and bytes a day; what it forbids stays in DRAM only.

The SSD's endurance is the real limit of a write-behind cache (facts: about 3.5 GiB/s of writes for the conversation
trace at 64 MiB a 512-token block). Pure: time is a parameter.
"""

from __future__ import annotations

BURST_S = 10.0
DAY_S = 86400.0


class WriteBudget:
    """Zero means no limit."""

    def __init__(self, bytes_per_s: int = 0, bytes_per_day: int = 0) -> None:
        self.bytes_per_s = bytes_per_s
        self.bytes_per_day = bytes_per_day
        self._tokens = bytes_per_s * BURST_S
        self._filled_s: float | None = None
        self._day_started_s: float | None = None
        self._day_bytes = 0

    def change(self, bytes_per_s: int, bytes_per_day: int) -> None:
        """New limits at once; what was written today still counts."""
        self.bytes_per_s, self.bytes_per_day = bytes_per_s, bytes_per_day
        self._tokens = min(self._tokens, bytes_per_s * BURST_S)

    def take(self, size_bytes: int, now_s: float) -> bool:
        """Whether `size_bytes` may be written now; if so they are counted."""
        if self._day_started_s is None or now_s - self._day_started_s >= DAY_S:
            self._day_started_s, self._day_bytes = now_s, 0
        if self.bytes_per_day and self._day_bytes + size_bytes > self.bytes_per_day:
            return False
        if self.bytes_per_s:
            since_s = now_s - (self._filled_s if self._filled_s is not None else now_s)
            self._filled_s = now_s
            self._tokens = min(max(self.bytes_per_s * BURST_S, size_bytes), self._tokens + since_s * self.bytes_per_s)
            if self._tokens < size_bytes:
                return False
            self._tokens -= size_bytes
        self._day_bytes += size_bytes
        return True

    @property
    def day_bytes(self) -> int:
        """Written in the current day."""
        return self._day_bytes
