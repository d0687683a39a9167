"""A real server over a real manager and arena on a loop thread, and real client processes for it."""

from __future__ import annotations

import asyncio
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import uvloop
from server_manager import ARENA_BYTES, WatchedManager
from server_raw_client import WAIT_S, RawClient

from kvstore.arena import Arena
from kvstore.ledger import Ledger
from kvstore.server import Limits, Server
from kvstore.wire import messages as m

uvloop.new_event_loop().close()  # libuv keeps a pipe for signals from its first loop on: not a leak of the first test


def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.002)


class Rig:
    """Everything of one daemon but its process: `with Rig() as rig`. Methods are for the test's thread."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        manager: type[WatchedManager] = WatchedManager,
        admin_verbs: dict[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="kvs-")  # short: a socket's path has 107 bytes
        folder = folder or Path(self._temporary.name)
        self.socket_path = folder / "kvstore.sock"
        self.admin_path = folder / "admin.sock"
        self.ledger = Ledger()
        self.manager: WatchedManager
        self.server: Server
        self._limits = limits or Limits()
        self._manager_class = manager
        self._admin_verbs = admin_verbs or {}
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rig")

    def __enter__(self) -> Rig:
        self._thread.start()
        self.run(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self._stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._temporary.cleanup()

    def run_alone(self) -> None:
        """Start and stop at once: for rigs that are expected to fail, whose error is raised."""
        self._thread.start()
        try:
            self.run(self._start)
        finally:
            self.__exit__(None, None, None)

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a plain or coroutine function on the loop's thread and return its result."""

        async def call() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(60)

    async def _start(self) -> None:
        self._arena = Arena.create(ARENA_BYTES, "never")
        self.manager = self._manager_class(self._arena, self.ledger, self._loop)
        await self.manager.start()
        self.server = Server(
            self.manager,
            self.socket_path,
            self.admin_path,
            ledger=self.ledger,
            limits=self._limits,
            admin_verbs=self._admin_verbs,
        )
        await self.server.start()

    async def _stop(self) -> None:
        await self.server.stop(0.5)
        self.manager.close()
        self._arena.close()
        del self.manager, self.server, self._arena  # the arena is unmapped when nothing looks at it any more

    def count(self, name: str, label: str | None = None) -> float:
        value: float = self.run(lambda: self.ledger.value(name, label))
        return value

    def status(self) -> dict[str, Any]:
        with self.admin() as admin:
            answer = admin.ask(m.AdminCall("status"))
        assert isinstance(answer, m.AdminAnswer)
        server: dict[str, Any] = answer.result["server"]
        return server

    def connect(self) -> RawClient:
        return RawClient(self.socket_path)

    def admin(self) -> RawClient:
        return RawClient(self.admin_path)

    def client(self, session: bytes | None = None, label: str = "test", quiet: bool = False) -> RawClient:
        """Connected and greeted, with a root opened (`client.root`)."""
        client = self.connect()
        try:
            client.greet(session, label, quiet)
            client.open_root()
        except BaseException:
            client.close()
            raise
        return client

    def child(self, *options: str, session: bytes) -> Child:
        return Child(self.socket_path, session, *options)


class Child:
    """A client process (server_child.py) that has greeted and opened a root. `with`: it is killed at the end."""

    def __init__(self, path: Path, session: bytes, *options: str) -> None:
        script = Path(__file__).with_name("server_child.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(path), session.hex(), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._line() == "ready"

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def tell(self, command: str) -> str:
        """Send one command of server_child.py and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        return self._line()

    def pause(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        eventually(lambda: Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 30)[0], "the child says nothing"
        return self.process.stdout.readline().strip()
