"""A daemon and an engine, and what tests do with both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_process import EngineProcess

from kvstore.testing.daemon import DaemonProcess

CHUNK_TOKENS = 64
PATIENT_S = 1.0
"""On a busy machine an answer may take longer than the 20 ms that are right for serving; no timing is tested here."""
OFF = {"kvstore": {"off": True}}


@dataclass
class Rig:
    daemon: DaemonProcess
    engine: EngineProcess

    def cold(self, tokens: list[int], **more: Any) -> dict[str, Any]:
        """Computed from nothing, and nothing kept of it."""
        self.engine.reset()
        result = self.engine.generate([{"tokens": tokens, "params": OFF, **more}])[0]
        self.engine.reset()
        assert result["cached"] == 0
        return result

    def stored(self, tokens: list[int], **more: Any) -> dict[str, Any]:
        """Computed and stored, and gone from the engine's own cache."""
        result = self.engine.generate([{"tokens": tokens, **more}])[0]
        assert self.engine.reset(), "the engine still holds blocks"
        return result

    def run(self, tokens: list[int], **more: Any) -> dict[str, Any]:
        return self.engine.generate([{"tokens": tokens, **more}])[0]

    def counted(self, before: dict[str, int]) -> dict[str, int]:
        """Events since `before`."""
        now = self.engine.counts()
        return {name: count - before.get(name, 0) for name, count in now.items() if count != before.get(name, 0)}

    def nothing_held(self) -> None:
        free, total = self.engine.free_blocks()
        assert free == total, f"{total - free} blocks are still held"
