"""How commands print: styled on a terminal, plain aligned text when piped, a JSON document with `--json`.

Results go to standard output, everything else (progress, hints, errors) to standard error, so that pipes stay clean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

SCHEMA = 1
"""Of all JSON documents: raised when a field is removed or changes its meaning, not when one is added."""


class Output:
    """command: named in the JSON document. as_json: `--json` was given; text methods then print nothing."""

    def __init__(self, command: str, as_json: bool) -> None:
        self._command = command
        self.as_json = as_json
        self._console = Console(highlight=False, soft_wrap=True)

    def document(self, **fields: Any) -> None:
        """The JSON document, on one line; nothing unless `--json` was given."""
        if self.as_json:
            fields.pop("schema", None)
            text = json.dumps({"schema": SCHEMA, "command": self._command, **fields}, default=str, ensure_ascii=False)
            print(text, flush=True)

    def line(self, text: str, style: str = "") -> None:
        if not self.as_json:
            self._console.print(Text(text, style=style))

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """`name  value`, aligned."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            if not self.as_json:
                self._console.print(Text.assemble((f"{name:<{width}}", "bold"), "  ", value))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
        """Aligned columns under a heading, never cut to a width; `right` names those of numbers."""
        if self.as_json:
            return
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        for number, row in enumerate([columns, *rows]):
            cells = [
                cell.rjust(width) if column in right else cell.ljust(width)
                for cell, width, column in zip(row, widths, columns, strict=True)
            ]
            self.line("  ".join(cells).rstrip(), "" if number else "bold")


def say(text: str) -> None:
    """A remark on standard error."""
    print(text, file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """`1 chunk`, `2 chunks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """`93784` -> `1d 2h 3m`; below a minute `12.3s`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes = int(seconds // 60)
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    words = [(days, "d"), (hours, "h"), (minutes, "m")]
    return " ".join(f"{number}{unit}" for number, unit in words if number) or "0m"
