"""A client in a pid namespace that the daemon cannot see (another container): it has no pid here, but a pidfd."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_rig import Child, eventually

pytestmark = pytest.mark.root("makes a pid namespace")

SERVER = """
import json, sys
from pathlib import Path
from server_rig import Rig
with Rig(folder=Path(sys.argv[1])) as rig:
    for line in sys.stdin:
        status = rig.status()
        answer = {"processes": [row["processes"] for row in status["sessions"]], "limbo": status["processes_in_limbo"]}
        answer["gone"] = sum(1 for what, _ in rig.manager.events if what == "owner_gone")
        print(json.dumps(answer), flush=True)
"""
SESSION = b"session of tests"


@pytest.fixture
def contained() -> Iterator[tuple[Path, Callable[[], dict[str, object]]]]:
    """Socket of a server in a pid namespace of its own, and a function that asks how it sees its clients."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as name:
        command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", SERVER, name]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=Path(__file__).parent
        ) as server:

            def ask() -> dict[str, object]:
                assert server.stdin is not None
                assert server.stdout is not None
                server.stdin.write("?\n")
                assert select.select([server.stdout], [], [], 30)[0], "the server says nothing"
                answer: dict[str, object] = json.loads(server.stdout.readline())
                return answer

            ask()
            yield Path(name) / "kvstore.sock", ask
            assert server.stdin is not None
            server.stdin.close()
            server.wait(30)


def test_processes_without_a_pid_are_told_apart_and_watched(
    contained: tuple[Path, Callable[[], dict[str, object]]],
) -> None:
    """All of them have pid 0 here; taking them for one process would free the slots of a living writer."""
    path, ask = contained
    with Child(path, SESSION) as first, Child(path, SESSION) as second:
        assert ask() == {"processes": [[0]], "limbo": 0, "gone": 0}
        for child, key in ((first, b"1" * 32), (second, b"2" * 32)):
            assert child.tell(f"reserve {key.hex()}") == "1"
        first.tell("close 0")
        eventually(lambda: ask()["limbo"] == 1)
        second.tell("quiet")
        assert ask()["gone"] == 0
        first.kill()
        eventually(lambda: ask()["gone"] == 1)
        second.kill()
        eventually(lambda: ask()["gone"] == 2)
