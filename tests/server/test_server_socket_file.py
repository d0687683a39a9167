"""Claiming a path: stale files are replaced, living daemons and foreign files are not touched."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_rig import Rig

from kvstore.errors import Denied, Invalid, KVStoreError, Unavailable
from kvstore.server.socket_file import SocketFile
from kvstore.wire import messages as m


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as name:
        yield Path(name)


def claim(path: Path, mode: int = 0o660, group: str | None = None) -> SocketFile:
    return SocketFile.claim(path, mode, group, 8)


def one_sentence(error: KVStoreError) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 300
    return text


HOLDER = """
import sys, time
from pathlib import Path
from kvstore.server.socket_file import SocketFile
held = SocketFile.claim(Path(sys.argv[1]), 0o660, None, 8)
print("held", flush=True)
time.sleep(60)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("stopped", [False, True])
def test_a_living_daemon_is_not_displaced_and_is_named(folder: Path, stopped: bool) -> None:
    """Not even one that stands still and would not answer a probe."""
    path = folder / "kvstore.sock"
    with holder(path) as process:
        if stopped:
            process.send_signal(signal.SIGSTOP)
        with pytest.raises(Unavailable) as caught:
            claim(path)
        assert one_sentence(caught.value) == f"another kvstore daemon (process {process.pid}) is serving {path}"
        assert stat.S_ISSOCK(path.stat().st_mode)
        process.kill()


def test_the_socket_of_a_killed_daemon_is_replaced(folder: Path) -> None:
    path = folder / "kvstore.sock"
    with holder(path) as process:
        process.kill()
    before = path.stat().st_ino, path.stat().st_mtime_ns
    claimed = claim(path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) != before
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    claimed.close()


def test_a_second_server_in_the_same_folder_is_refused_and_the_first_goes_on() -> None:
    with tempfile.TemporaryDirectory(prefix="kvs-") as name, Rig(folder=Path(name)) as first:
        second = Rig(folder=Path(name))
        with pytest.raises(Unavailable, match=r"another kvstore daemon \(process \d+\) is serving"):
            second.run_alone()
        with first.client() as client:
            assert client.ask(m.Ping()) == m.Done()


def test_a_refused_admin_socket_gives_the_data_socket_back(folder: Path) -> None:
    (folder / "admin.sock").write_text("precious")
    rig = Rig(folder=folder)
    with pytest.raises(Invalid, match="is not a socket"):
        rig.run_alone()
    assert not (folder / "kvstore.sock").exists()
    claim(folder / "kvstore.sock").close()


def test_a_file_that_is_no_socket_is_kept(folder: Path) -> None:
    path = folder / "kvstore.sock"
    path.write_text("precious")
    with pytest.raises(Invalid) as caught:
        claim(path)
    assert "not a socket" in one_sentence(caught.value)
    assert path.read_text() == "precious"


def test_a_link_is_not_followed(folder: Path) -> None:
    (folder / "target").write_text("precious")
    (folder / "kvstore.sock").symlink_to(folder / "target")
    with pytest.raises(Invalid):
        claim(folder / "kvstore.sock")
    assert (folder / "target").read_text() == "precious"


@pytest.mark.parametrize("backlog", [0, 8])
def test_the_socket_of_another_program_is_kept(folder: Path, backlog: int) -> None:
    path = folder / "kvstore.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(backlog)
        with pytest.raises(Unavailable, match="belongs to a program that is running"):
            claim(path)
        assert path.exists()


def test_a_path_too_long_is_named_with_the_limit(folder: Path) -> None:
    with pytest.raises(Invalid, match="at most 107 bytes"):
        claim(folder / ("x" * 120))


def test_an_unknown_group_is_named(folder: Path) -> None:
    with pytest.raises(Invalid, match="no group 'nosuchgroup'"):
        claim(folder / "kvstore.sock", group="nosuchgroup")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_mode_is_as_asked_whatever_the_umask(folder: Path, mode: int) -> None:
    umask = os.umask(0o077)
    try:
        claimed = claim(folder / "made" / "kvstore.sock", mode)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(claimed.path.stat().st_mode) == mode
    claimed.close()
    assert not claimed.path.exists()
    claimed.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_denied(folder: Path) -> None:
    folder.chmod(0o500)
    with pytest.raises(Denied, match="Permission denied"):
        claim(folder / "kvstore.sock")


def test_a_folder_that_is_a_file_is_invalid(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(Invalid):
        claim(folder / "file" / "kvstore.sock")


def test_closing_does_not_remove_what_somebody_else_put_there(folder: Path) -> None:
    path = folder / "kvstore.sock"
    claimed = claim(path)
    path.unlink()
    path.write_text("precious")
    claimed.close()
    assert path.read_text() == "precious"


def test_stopping_removes_both_sockets_and_twice_is_once() -> None:
    with Rig() as rig:
        assert rig.run(lambda: rig.server.stop(0.1)) == 0
        assert not rig.socket_path.exists()
        assert not rig.admin_path.exists()
        assert rig.run(lambda: rig.server.stop(0.1)) == 0
        handler = rig.run(lambda: asyncio.get_running_loop().get_exception_handler())
        assert handler is None
