"""A real vLLM engine as a child process, for tests: `with EngineProcess(...) as engine: engine.generate(prompts)`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

CHILD = Path(__file__).with_name("engine_child.py")


class EngineFailed(Exception):
    """The engine did not start, or its process ended; the text has the end of its log."""


class EngineProcess:
    """Started by `with`; ended by closing its input, killed where that takes more than 20 s."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        connector: dict[str, Any] | None,
        *,
        ranks: int = 1,
        policy: str = "recompute",
        async_scheduling: bool = False,
        **engine: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / f"engine{len(list(folder.glob('engine*.log')))}.log"
        self._settings = {
            "model": str(model), "connector": connector, "ranks": ranks, "policy": policy, "engine": engine,
            "async_scheduling": async_scheduling,
        }  # fmt: skip
        self._environment = os.environ | {"VLLM_LOGGING_LEVEL": "INFO"}

    def __enter__(self) -> EngineProcess:
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(CHILD), json.dumps(self._settings | {"answers": writing})],
                stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[writing], env=self._environment, text=True,
            )  # fmt: skip
        os.close(writing)
        try:
            self._answer()
        except EngineFailed:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def __getattr__(self, name: str) -> Any:
        """Methods of `engine_child.Engine`."""

        def call(*arguments: Any) -> Any:
            self.send(name, *arguments)
            return self.receive()

        return call

    def send(self, name: str, *arguments: Any) -> None:
        """Start a command; `receive` its answer. In between the test does something to the daemon."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, "args": arguments}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        return self._answer()

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise EngineFailed(f"the engine's process ended:\n{self.log()[-6000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer["result"]
