"""One line an event: `time level logger: message key=value ...`, or the same as JSON.

Modules log through `logging.getLogger(__name__)` with a constant message and `extra={"fields": {...}}`; this module
formats. The same message is written at most LINES_PER_PERIOD times in PERIOD_S; the next one then says how many were
left out. Fields whose name suggests a secret are masked. Thread-safe, as `logging` is.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Literal, TextIO

LINES_PER_PERIOD = 20
PERIOD_S = 10.0
MAX_FIELD_CHARACTERS = 500
MAX_EXCEPTION_CHARACTERS = 8000
_SECRET = re.compile(r"secret|token|passw|salt|credential|authori[sz]ation|api_?key|private", re.IGNORECASE)


def masked(name: str, value: object) -> object:
    """`value`, or `***` where `name` suggests that it is a secret."""
    return "***" if _SECRET.search(name) and value else value


class RateLimit(logging.Filter):
    """Drops what exceeds the rate of one (logger, level, message)."""

    def __init__(self, lines: int = LINES_PER_PERIOD, period_s: float = PERIOD_S) -> None:
        super().__init__()
        self._lines = lines
        self._period_s = period_s
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, record.levelno, str(record.msg))
        now_s = time.monotonic()
        start_s, count = self._seen.get(key, (now_s, 0))
        if now_s - start_s >= self._period_s:
            if count > self._lines:
                record.left_out = count - self._lines
            start_s, count = now_s, 0
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[key] = (start_s, count + 1)
        return count < self._lines


class LineFormatter(logging.Formatter):
    """Text or JSON; a traceback becomes one line too, so that each event stays greppable."""

    def __init__(self, style: Literal["text", "json"]) -> None:
        super().__init__()
        self._json = style == "json"

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = {name: _short(masked(name, value)) for name, value in getattr(record, "fields", {}).items()}
        if hasattr(record, "left_out"):
            fields["left_out"] = record.left_out
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)[-MAX_EXCEPTION_CHARACTERS:]
        level, name = record.levelname.lower(), record.name.removeprefix("kvstore.")
        if self._json:
            head = {"at": at, "level": level, "logger": name, "message": record.getMessage()}
            return json.dumps(head | fields, default=str, ensure_ascii=False)
        words = "".join(f" {name}={_quoted(value)}" for name, value in fields.items())
        return f"{at} {level:<7} {name}: {_one_line(record.getMessage())}{words}"


def configure(level: str, style: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Send all logs of the process to `stream` (standard error), replacing what was configured before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(style))
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


def _short(value: object) -> object:
    if isinstance(value, (int, float)):
        return value
    text = str(value)
    return text if len(text) <= MAX_FIELD_CHARACTERS else text[:MAX_FIELD_CHARACTERS] + "..."


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r")


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or re.search(r'[\s"=]', text) else text
