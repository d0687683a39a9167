"""Settings: precedence of the four sources, types, errors that name the source and the nearest name."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.config import SETTINGS, Config, default_admin_path, default_socket_path
from kvstore.errors import Invalid

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(text)
    return path


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = written(tmp_path, '[arena]\nsize = "1GiB"\nhuge_pages = "never"\n[lease]\nttl = 5\n')
    environ = {"KVSTORE_ARENA_SIZE": "2GiB", "KVSTORE_LEASE_TTL": "6s", "HOME": str(tmp_path)}
    config = Config.load(file, environ, {"arena.size": "3GiB", "log.level": None})
    assert [config.arena_size, config.lease_ttl, config.arena_huge_pages, config.log_level] == [
        "3GiB",
        6.0,
        "never",
        "info",
    ]
    names = ["arena.size", "lease.ttl", "arena.huge_pages", "log.level"]
    assert [config.origin(name) for name in names] == [
        "flag",
        "environment KVSTORE_LEASE_TTL",
        f"file {file}",
        "default",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[arena]\nsiez = 1", "there is no setting 'arena.siez'; did you mean 'arena.size'?"),
        ("[areana]\nsize = 1", "there is no setting 'areana.size'; did you mean 'arena.size'?"),
        ("verbose = true", "there is no setting 'verbose'"),
        ("[arena]\nsize = 'much'", "arena.size: size 'much' is not understood: write it like 64GiB"),
        ("[arena]\nsize = '120%'", "arena.size: size '120%' is more than 100%"),
        ("[arena]\nhuge_pages = 'allways'", "not one of: auto, always, never; did you mean 'always'?"),
        ("[ssd]\nio_threads = true", "ssd.io_threads: True is not a whole number from 1 to 64"),
        ("[ssd]\nio_threads = 65", "ssd.io_threads: 65 is not a whole number from 1 to 64"),
        ("[ssd]\nio_threads = 1.5", "ssd.io_threads: 1.5 is not a whole number from 1 to 64"),
        ("[ssd]\npaths = ['/a', '/a']", "names a folder twice"),
        ("[ssd]\npaths = ['/a', 7]", "is not a list of folders"),
        ("[ssd]\nwrite_bytes_per_second = -1", "is negative"),
        ("[lease]\nttl = nan", "lease.ttl: nan is not a number of seconds from 0.1 to 3600"),
        ("[lease.ttl]\nseconds = 3", "lease.ttl: {'seconds': 3} is not a number of seconds"),
        ("[socket]\nmode = 660", "socket.mode: 660 is not a file mode: write it like 0660"),
        ("[socket]\npath = 7", "socket.path: 7 is not text"),
        ("[socket", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_reason(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(Invalid) as caught:
        Config.load(path, {})
    assert str(caught.value).startswith(f"file {path}: ")
    assert said in str(caught.value)


def test_an_absent_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no such file"):
        Config.load(tmp_path / "absent.toml", {})
    with pytest.raises(Invalid, match="is a directory"):
        Config.load(None, {"KVSTORE_CONFIG": str(tmp_path)})


def test_the_variables_of_a_kubernetes_service_called_kvstore_are_not_ours() -> None:
    """Kubernetes sets these in every pod beside a service of our name; refusing them would stop the daemon there."""
    environ = {
        "KVSTORE_PORT": "tcp://10.0.0.1:80",
        "KVSTORE_SERVICE_HOST": "10.0.0.1",
        "KVSTORE_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVSTORE_CONFIG": "/dev/null",
    }
    assert Config.load(None, environ).origins == {}
    with pytest.raises(Invalid, match="there is no setting 'KVSTORE_ARENA_SIZ'; did you mean 'KVSTORE_ARENA_SIZE'"):
        Config.load(None, {**environ, "KVSTORE_ARENA_SIZ": "1GiB"})


@pytest.mark.parametrize("none", [[], "none", ""])
def test_no_ssd_can_be_said_in_every_source(none: object) -> None:
    assert Config.load(None, {"HOME": "/"}, {"ssd.paths": none}).ssd_paths == ()


def test_folders_follow_systemd_then_xdg(tmp_path: Path) -> None:
    systemd = {"RUNTIME_DIRECTORY": "/run/a", "STATE_DIRECTORY": "/var/lib/a:/var/lib/b", "NOTIFY_SOCKET": "@n"}
    xdg = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}
    unit = Config.load(None, {**xdg, **systemd})
    assert (unit.socket_path, unit.admin_path) == (Path("/run/a/kvstore.sock"), Path("/run/a/admin.sock"))
    assert (unit.ssd_paths, unit.notify_socket) == ((Path("/var/lib/a/ssd"),), "@n")
    user = Config.load(None, xdg)
    assert user.socket_path == tmp_path / "kvstore" / "kvstore.sock"
    assert user.ssd_paths == (tmp_path / "state" / "kvstore" / "ssd",)


def test_a_client_takes_the_first_socket_that_exists(tmp_path: Path) -> None:
    """An engine that runs as a unit has a $RUNTIME_DIRECTORY of its own; started before the daemon, it waited there."""
    unit, user = tmp_path / "engine", tmp_path / "user"
    (user / "kvstore").mkdir(parents=True)
    unit.mkdir()
    environ = {"RUNTIME_DIRECTORY": str(unit), "XDG_RUNTIME_DIR": str(user)}
    path = user / "kvstore" / "kvstore.sock"
    assert default_socket_path(environ) == path
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert (
            default_socket_path({**environ, "XDG_RUNTIME_DIR": str(unit), "RUNTIME_DIRECTORY": str(path.parent)})
            == path
        )
    assert default_admin_path({"KVSTORE_SOCKET_PATH": "/a/b.sock"}) == Path("/a/admin.sock")


def test_every_setting_is_documented_and_there_are_few() -> None:
    assert len(SETTINGS) <= 25
    text = DOCUMENT.read_text()
    assert [name for name in SETTINGS if f"| `{name}` | `{SETTINGS[name].variable}` |" not in text] == []
    printed = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "config", "table"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == text, "run: kvstore config table > docs/configuration.md"


def test_differing_names_what_a_reload_changes(tmp_path: Path) -> None:
    before = Config.load(None, {"HOME": str(tmp_path)})
    after = Config.load(None, {"HOME": str(tmp_path)}, {"lease.ttl": 3, "arena.size": "1GiB", "log.level": "info"})
    assert [(row.name, row.reload) for row in before.differing(after)] == [("arena.size", False), ("lease.ttl", True)]


def test_an_empty_table_that_is_no_section_is_refused(tmp_path: Path) -> None:
    """`[ssd2]` with nothing in it yet was accepted in silence, and so was what its writer thought it would do."""
    path = tmp_path / "kvstore.toml"
    path.write_text("[ssd]\n[ssd2]\n")
    with pytest.raises(Invalid, match="ssd2"):
        Config.load(path, {}, {})
    path.write_text("[ssd]\n")
    assert Config.load(path, {}, {}) is not None
