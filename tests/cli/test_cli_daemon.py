"""The commands against a real daemon: what they print, their JSON and their exit codes."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Cli

from kvstore.testing.daemon import DaemonProcess
from kvstore.units import MiB

At = dict[str, str]


def test_ping_and_status(cli: Cli, shared: DaemonProcess, at: At) -> None:
    result = cli("ping", environ=at)
    assert result.code == 0
    assert re.fullmatch(r"kvstore \S+ \(protocol 1\) answers on \S+: median \d+ us, worst \d+ us of 5\n", result.text)
    assert cli("ping", "-c", 2, "--json", environ=at).document["count"] == 2
    result = cli("status", environ=at)
    assert result.code == 0
    assert re.match(rf"kvstore \S+ on {shared.socket_path}: ok, up \d", result.text)
    document = cli("status", "--json", environ=at).document
    assert (document["health"], document["arena"]["size_bytes"]) == ("ok", 128 * MiB)
    assert [volume["path"] for volume in document["ssd"]] == [str(shared.ssd_path)]
    assert cli("status", "--config", shared.config_path).code == 0, "the file's socket.path is used"


def test_a_file_goes_in_and_comes_out(cli: Cli, at: At, tmp_path: Path) -> None:
    data = os.urandom(3 * MiB + 17)
    (tmp_path / "in").write_bytes(data)
    result = cli("put", "some file.bin", "in", environ=at)
    assert result.code == 0, result.err
    assert result.text.startswith("some file.bin: 3.0 MiB in 4 chunks of 1 MiB, ")
    assert cli("get", "some file.bin", "out", environ=at).code == 0
    assert (tmp_path / "out").read_bytes() == data
    assert cli("get", "some file.bin", environ=at).out == data
    document = cli("get", "some file.bin", "out2", "--json", environ=at).document
    assert (document["length_bytes"], document["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("size", [0, MiB - 64, MiB - 63, 20 * MiB])
def test_every_size_through_a_pipe(cli: Cli, at: At, size: int) -> None:
    """64 bytes of the first chunk are its head, so chunk borders lie at n MiB - 64."""
    data = os.urandom(size)
    assert cli("put", f"piped{size}", stdin=data, environ=at).code == 0
    result = cli("get", f"piped{size}", environ=at)
    assert (result.code, result.out) == (0, data)


def test_put_does_not_lie_about_what_is_there(cli: Cli, at: At) -> None:
    assert cli("put", "a", stdin=b"one", environ=at).code == 0
    again = cli("put", "a", "--json", stdin=b"one", environ=at)
    assert (again.code, again.document["result"]) == (0, "exists")
    other = cli("put", "a", stdin=b"two", environ=at)
    assert (other.code, other.err) == (1, "kvstore: a is stored with other content; use --replace or another name\n")
    assert cli("put", "a", "--replace", stdin=b"two", environ=at).code == 0
    assert cli("get", "a", environ=at).out == b"two"
    assert cli("put", "b", "--durable", "--json", stdin=b"x", environ=at).document["result"] == "stored_ssd"


def test_what_is_not_stored_is_exit_4(cli: Cli, at: At, tmp_path: Path) -> None:
    for words in (["get", "x"], ["rm", "x"], ["inspect", "x"], ["rm", "0" * 64], ["purge", "abc", "--yes"]):
        result = cli(*words, environ=at)
        assert result.code == 4, words
        assert "Traceback" not in result.err
    assert cli("get", "x", "out", environ=at).code == 4
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
    assert cli("put", "x", "absent-file", environ=at).code == 4
    assert cli("ls", "abcdef", environ=at).code == 2


def test_ls_inspect_rm_and_purge(cli: Cli, make_daemon: Callable[..., DaemonProcess]) -> None:
    at = {"KVSTORE_SOCKET_PATH": str(make_daemon(arena_bytes=64 * MiB).socket_path)}
    assert cli("ls", environ=at).text == "nothing is stored\n"
    cli("put", "a", stdin=bytes(3 * MiB), environ=at)
    cli("put", "b", stdin=b"b", environ=at)
    roots = cli("ls", "--json", environ=at).document["roots"]
    assert [(root["model"], root["chunks"]) for root in roots] == [("kvstore-cli", 5)]
    root = roots[0]["root"]
    assert cli("ls", environ=at).text.splitlines()[1].split() == [root[:16], "kvstore-cli", "5"]
    listed = cli("ls", root[:8], "--json", environ=at).document
    assert (len(listed["chunks"]), listed["complete"]) == (5, True)
    part = cli("ls", root[:8], "-n", 2, "--json", environ=at).document
    assert (len(part["chunks"]), part["complete"]) == (2, False)
    assert len(cli("ls", root[:8], environ=at).text.splitlines()) == 6

    found = cli("inspect", "a", "--json", environ=at).document
    assert [chunk["root"] for chunk in found["found"]] == [root]
    by_key = cli("inspect", found["key"], environ=at)
    assert by_key.code == 0
    assert re.search(r"^tiers +dram", by_key.text, re.MULTILINE)

    assert cli("rm", "a", environ=at).text == "4 chunks removed\n"
    assert cli("get", "a", environ=at).code == 4
    assert cli("get", "b", environ=at).out == b"b"
    gone = cli("inspect", "a", "--json", environ=at)
    assert (gone.code, gone.document["found"]) == (4, [])
    assert cli("purge", root[:8], environ=at).code == 130, "without --yes it asks, and nobody answers"
    assert cli("purge", root[:8], "--yes", "--json", environ=at).document["removed"] == 1
    assert cli("get", "b", environ=at).code == 4


def test_stat_counts_and_shows_rates(cli: Cli, at: At) -> None:
    cli("put", "counted", stdin=b"a", environ=at)
    counters = cli("stat", "--json", environ=at).document["counters"]
    assert counters["requests_total"]["Reserve"] >= 1
    assert re.search(r"^requests_total\{Reserve\} +\d+$", cli("stat", environ=at).text, re.MULTILINE)
    lines = cli("stat", "-i", 0.1, "-n", 2, environ=at).text.splitlines()
    assert len(lines) == 2
    assert all(re.match(r"\d\d:\d\d:\d\d  admin_requests_total\{stat\} \S+/s", line) for line in lines)


def test_flush_waits_for_the_ssd(cli: Cli, at: At) -> None:
    before = cli("status", "--json", environ=at).document["ssd"][0]["chunks"]
    cli("put", "flushed", stdin=os.urandom(8 * MiB), environ=at)
    assert cli("flush", environ=at).code == 0
    document = cli("status", "--json", environ=at).document
    assert document["dram"]["dirty_bytes"] == 0
    assert document["ssd"][0]["chunks"] >= max(9, before)


def test_a_frozen_daemon_is_unreachable_and_not_a_hang(cli: Cli, shared: DaemonProcess, at: At) -> None:
    os.kill(shared.pid, signal.SIGSTOP)
    try:
        result = cli("ping", "--timeout", 0.3, environ=at)
    finally:
        os.kill(shared.pid, signal.SIGCONT)
    assert result.code == 3
    assert "does not answer" in result.err


def test_more_than_the_store_holds_is_said(cli: Cli, make_daemon: Callable[..., DaemonProcess]) -> None:
    """Without an SSD, and with an arena smaller than the file, no answer may claim that the file is stored."""
    daemon = make_daemon(arena_bytes=16 * MiB, ssd_bytes=0)
    at = {"KVSTORE_SOCKET_PATH": str(daemon.socket_path)}
    result = cli("put", "big", stdin=os.urandom(40 * MiB), environ=at)
    assert result.code == 1
    assert "big was not stored: there is no room" in result.err
    assert cli("put", "small", stdin=b"small", environ=at).code == 0
    assert cli("get", "small", environ=at).out == b"small"
