"""The admin socket: its verbs there and nowhere else, its errors, who may use it."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import subprocess
import sys
from typing import Any

import pytest
from server_rig import Rig, eventually

from kvstore.errors import Full
from kvstore.server import Limits
from kvstore.wire import messages as m
from kvstore.wire.frame import FrameReader, encode

ADMIN_CALL = m.AdminCall("status")


def test_admin_verbs_are_refused_on_the_data_socket(rig: Rig) -> None:
    with rig.client() as greeted, rig.connect() as fresh:
        for client in (greeted, fresh):
            answer = client.ask(ADMIN_CALL)
            assert isinstance(answer, m.Failed)
            assert answer.code == "denied"
            assert "use the admin socket" in answer.message
            assert client.closed()


@pytest.mark.parametrize("message", [m.Ping(), m.Lookup(1, 0, b"k" * 32), m.Stats(), m.Hello(1, 1, b"s" * 16)])
def test_data_verbs_are_refused_on_the_admin_socket(rig: Rig, message: m.Message) -> None:
    with rig.admin() as client:
        answer = client.ask(message)
        assert isinstance(answer, m.Failed)
        assert answer.code == "denied"
        assert "use the data socket" in answer.message
        assert client.closed()


def test_sockets_have_their_modes(rig: Rig) -> None:
    assert stat.S_IMODE(os.stat(rig.socket_path).st_mode) == 0o660
    assert stat.S_IMODE(os.stat(rig.admin_path).st_mode) == 0o600


def test_status_tells_of_the_server_beside_the_manager(rig: Rig) -> None:
    with rig.client(label="engine"), rig.admin() as admin:
        answer = admin.ask(ADMIN_CALL)
        assert isinstance(answer, m.AdminAnswer)
        assert answer.result["server"]["connections"] == 1
        assert answer.result["server"]["sessions"][0]["labels"] == ["engine"]
        assert len(answer.result) > 1  # the manager's part
        assert isinstance(admin.ask(m.AdminCall("stat")), m.AdminAnswer)


@pytest.mark.parametrize(
    ("verb", "words"), [("statsu", "did you mean `status`?"), ("x" * 3000, "there are "), ("__init__", "there are ")]
)
def test_an_unknown_verb_names_the_nearest(rig: Rig, verb: str, words: str) -> None:
    with rig.admin() as admin:
        answer = admin.ask(m.AdminCall(verb))
        assert isinstance(answer, m.Failed)
        assert answer.code == "invalid"
        assert words in answer.message
        assert len(answer.message) < 300
        assert isinstance(admin.ask(ADMIN_CALL), m.AdminAnswer)


async def _later(arguments: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0.01)
    if "fail" in arguments:
        raise Full("no room")
    if "bug" in arguments:
        raise ZeroDivisionError("a bug")
    return {"large": "x" * int(arguments.get("bytes", 0))}


def _at_once(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"echo": arguments["word"]} if arguments else {"large": "x" * (2 << 20)}


VERBS = {"later": _later, "reload": _at_once}


def test_the_daemons_own_verbs_at_once_and_later() -> None:
    with Rig(admin_verbs=VERBS) as rig, rig.admin() as admin:
        assert admin.ask(m.AdminCall("reload", {"word": "yes"})) == m.AdminAnswer({"echo": "yes"})
        assert admin.ask(m.AdminCall("later", {"bytes": 3})) == m.AdminAnswer({"large": "xxx"})
        assert admin.ask(m.AdminCall("later", {"fail": True})) == m.Failed("full", "no room")


@pytest.mark.parametrize("call", [m.AdminCall("later", {"bytes": 2 << 20}), m.AdminCall("reload")])
def test_an_answer_too_large_for_a_frame_is_an_error_and_not_a_broken_stream(call: m.AdminCall) -> None:
    with Rig(admin_verbs=VERBS) as rig, rig.admin() as admin:
        answer = admin.ask(call)
        assert isinstance(answer, m.Failed)
        assert "ask for less" in answer.message
        assert isinstance(admin.ask(ADMIN_CALL), m.AdminAnswer)


def test_a_bug_in_a_task_ends_one_connection() -> None:
    with Rig(admin_verbs=VERBS) as rig, rig.admin() as victim, rig.admin() as other:
        victim.send(m.AdminCall("later", {"bug": True}))
        assert victim.closed()
        assert isinstance(other.ask(ADMIN_CALL), m.AdminAnswer)
        assert rig.count("internal_errors_total", "ZeroDivisionError") == 1


def test_changes_are_logged_with_who_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvstore.server"), Rig(admin_verbs=VERBS) as rig, rig.admin() as admin:
        admin.ask(m.AdminCall("reload", {"word": "yes"}))
        admin.ask(m.AdminCall("stat"))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("admin:")]
    assert lines == [f"admin: reload {{'word': 'yes'}} asked by process {os.getpid()}, user {os.getuid()}"]


def test_admin_connections_are_bounded_apart_from_data(rig: Rig) -> None:
    with Rig(Limits(max_admin_connections=1, max_connections=1)) as small, small.client() as data:
        with small.admin() as first:
            assert isinstance(first.ask(ADMIN_CALL), m.AdminAnswer)
            with small.admin() as second:
                assert isinstance(second.receive()[1], m.Failed)
        assert data.ask(m.Ping()) == m.Done()
        eventually(lambda: small.run(lambda: len(small.server.admin_connections)) == 0)


@pytest.mark.root("becomes another user")
def test_another_user_is_denied_even_where_the_file_lets_it_in(rig: Rig) -> None:
    """Somebody opened the admin socket's mode to everyone; the peer's credentials still say no."""
    rig.socket_path.parent.chmod(0o755)
    rig.admin_path.chmod(0o666)
    script = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(sys.stdin.buffer.read())\n"
        "sys.stdout.buffer.write(s.recv(4096))\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script, str(rig.admin_path)],
        input=encode(ADMIN_CALL, 1),
        capture_output=True,
        check=True,
    ).stdout
    ((_, answer),) = FrameReader().feed(said)
    assert isinstance(answer, m.Failed)
    assert answer.code == "denied"
    assert "user 65534" in answer.message


@pytest.mark.root("becomes another user")
def test_another_user_cannot_connect_to_either_socket(rig: Rig) -> None:
    rig.socket_path.parent.chmod(0o755)
    script = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "for path in sys.argv[1:]:\n"
        "    try: socket.socket(socket.AF_UNIX).connect(path)\n"
        "    except PermissionError: print('denied')\n"
    )
    paths = [str(rig.socket_path), str(rig.admin_path)]
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *paths], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["denied", "denied"]
