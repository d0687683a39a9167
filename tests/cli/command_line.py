"""What a run of the command gave. Imported by the tests of this folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KVSTORE = str(Path(sys.executable).with_name("kvstore"))


@dataclass(frozen=True)
class Result:
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def document(self) -> dict[str, Any]:
        """Standard output as the one JSON document that it must be."""
        parsed = json.loads(self.out)
        assert isinstance(parsed, dict)
        assert parsed["schema"] == 1
        return parsed


Cli = Callable[..., Result]
