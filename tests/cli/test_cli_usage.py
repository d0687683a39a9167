"""The command line without a daemon: help, usage errors, JSON errors, exit codes, and what it says of that."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import KVSTORE, Cli

from kvstore.cli import main

COMMANDS = [
    "serve", "status", "stat", "ping", "put", "get", "ls", "inspect", "rm", "purge", "flush", "reload", "config",
    "fsck", "version",
]  # fmt: skip


def test_help_names_every_command_and_the_exit_codes(cli: Cli) -> None:
    result = cli("--help")
    assert (result.code, result.err) == (0, "")
    assert re.findall(r"^  (\w+)  ", result.text, re.MULTILINE) == COMMANDS
    assert "3 no daemon, 4 not found, 5 degraded, 6 denied, 7 corruption" in " ".join(result.text.split())


@pytest.mark.parametrize("command", ["serve", "status", "stat", "put", "get", "ls", "inspect", "rm", "fsck", "purge"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = CliRunner().invoke(main.cli, [command, "--help"], prog_name="kvstore")
    assert result.exit_code == 0
    assert re.search(rf"Examples?:\n +(\S.*)?kvstore {command}", result.output)


def test_usage_errors_are_one_sentence_and_exit_with_2(cli: Cli, tmp_path: Path) -> None:
    assert cli().code == 2
    result = cli("statsu")
    assert (result.code, result.out) == (2, b"")
    assert result.err == "kvstore: there is no command 'statsu'; did you mean 'status'?; see: kvstore --help\n"
    result = cli("put", "name", "/nonexistent/file", "--json", environ={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert result.document["error"]["code"] == "unreachable"
    assert cli("serve", "--arena-sise", "1").code == 2


def test_no_daemon_says_how_to_start_one(cli: Cli, tmp_path: Path) -> None:
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path)}
    for command in (["status"], ["ping"], ["rm", "x"], ["inspect", "x"]):
        result = cli(*command, environ=runtime)
        assert (result.code, result.out) == (3, b"")
        assert re.fullmatch(r"kvstore: no daemon runs on \S+\.sock; start one with: kvstore serve\n", result.err)
    result = cli("status", "--socket", tmp_path / "x.sock", "--json")
    assert result.code == 3
    assert result.document["error"] == {
        "code": "unreachable",
        "exit": 3,
        "message": f"no daemon runs on {tmp_path}/admin.sock",
        "hint": f"start one with: kvstore serve --socket-path {tmp_path}/x.sock",
    }


def test_a_stale_socket_is_no_daemon(cli: Cli, tmp_path: Path) -> None:
    """After a crash the socket file is still there: connecting is refused, which is not `permission` nor a hang."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "admin.sock"))
    result = cli("status", "--socket", tmp_path / "kvstore.sock")
    assert result.code == 3
    assert "no daemon runs" in result.err


def test_version(cli: Cli) -> None:
    assert re.fullmatch(r"kvstore \d+\.\d+\.\d+\n", cli("--version").text)
    assert cli("version", "--json").document["protocol"] >= 1


def test_config_show_says_where_values_come_from(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text("[lease]\nttl = 7\n")
    words = ("config", "show", "--config", tmp_path / "k.toml", "--ssd-paths", "/a", "--ssd-paths", "/b")
    result = cli(*words, "--origin", environ={"KVSTORE_ARENA_SIZE": "1GiB"})
    assert result.code == 0
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in result.text.splitlines()}
    assert rows["arena.size"] == ["1GiB", "environment KVSTORE_ARENA_SIZE"]
    assert rows["lease.ttl"] == ["7", f"file {tmp_path}/k.toml"]
    assert rows["ssd.paths"] == ["/a:/b", "flag"]
    assert rows["socket.mode"] == ["0660", "default"]
    document = cli(*words, "--json").document
    assert document["settings"]["ssd.paths"] == {"value": "/a:/b", "origin": "flag"}


def test_config_check(cli: Cli, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(f'[arena]\nsize = "8MiB"\n[ssd]\npaths = ["{tmp_path}/ssd"]\nsize = "64MiB"\n')
    bad.write_text("[arena]\nsized = 1\n")
    free = {"XDG_RUNTIME_DIR": str(tmp_path)}
    document = cli("config", "check", good, "--json", environ=free).document
    assert (document["arena_bytes"], document["volumes"]) == (8 << 20, {f"{tmp_path}/ssd": 64 << 20})
    result = cli("config", "check", bad)
    assert result.code == 2
    assert result.err == f"kvstore: file {bad}: there is no setting 'arena.sized'; did you mean 'arena.size'?\n"
    result = cli("config", "check", good, "--arena-size", "9999GiB", environ=free)
    assert result.code == 2
    assert "does not fit: 9.8 TiB for the arena" in result.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[arena]\nsize = '9999GiB'\n", "does not fit"),
        ("[arena]\nsize = '8MiB'\n[ssd]\npaths = ['/proc/no']\n", "cannot make the folder /proc/no"),
        ("[arena]\nsize = '8MiB'\n[ssd]\npaths = 'none'\n[socket]\ngroup = 'nosuchgroup'\n", "no group 'nosuchgroup'"),
        ("[arnea]\nsize = '8MiB'\n", "did you mean 'arena.size'?"),
    ],
)
def test_serve_refuses_what_cannot_work_with_one_sentence(cli: Cli, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "k.toml").write_text(text)
    result = cli("serve", "--config", tmp_path / "k.toml", environ={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert result.code in (1, 2, 6)
    last = result.err.splitlines()[-1]
    assert last.startswith("kvstore: ")
    assert said in last


def test_a_reader_that_goes_away_is_no_error(cli: Cli) -> None:
    """`kvstore ... | head` was answered by `Exception ignored ... BrokenPipeError` when Python flushed at its exit."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    environ = {"PATH": os.environ["PATH"], "KVSTORE_CONFIG": "/dev/null"}
    try:
        for words in (["config", "table"], ["config", "show", "--origin"], ["version", "--json"]):
            done = subprocess.run([KVSTORE, *words], stdout=write_end, stderr=subprocess.PIPE, env=environ)
            assert (done.returncode, done.stderr) == (1, b"")
    finally:
        os.close(write_end)


def test_the_manual_has_every_command() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert [name for name in COMMANDS if f"\n| `{name}" not in manual] == []
