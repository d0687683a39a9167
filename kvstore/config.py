"""Settings: one table, typed, with sources in the order flags > environment > file > default.

A name is `section.field` in TOML, `KVSTORE_SECTION_FIELD` in the environment and `--section-field` as a flag. The class
below IS the table: each field carries its default, unit, range and reason, and `kvstore config table` prints it as
docs/configuration.md. This is the only module that reads the environment. Immutable; thread-safe.
Sizes given as a share of the machine stay text here: kvstore.host resolves them when the daemon starts.
"""

# ruff: noqa: RUF009
from __future__ import annotations

import dataclasses
import os
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.errors import Invalid
from kvstore.settings import (
    PREFIX,
    REQUIRED,
    Setting,
    auto_share_value,
    choice_value,
    count_value,
    mode_value,
    nearest,
    path_value,
    paths_value,
    seconds_value,
    setting,
    share_value,
    size_value,
    text_value,
)

CONFIG_VARIABLE = "KVSTORE_CONFIG"
"""Environment variable that names the file where `--config` is not given."""
SOCKET_NAME = "kvstore.sock"
ADMIN_NAME = "admin.sock"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings, checked one by one; `load` is the way to make one. Whether they fit the machine: kvstore.host."""

    arena_size: str = setting(
        "30%", share_value, "size or % of memory", "2MiB and up",
        "DRAM tier. The share counts from what is free now or what the cgroup allows, whichever is less",
    )  # fmt: skip
    arena_huge_pages: str = setting(
        "auto", choice_value("auto", "always", "never"), "", "auto, always, never",
        "Huge pages double the speed of direct I/O into the arena; `always` refuses to start without them",
    )  # fmt: skip
    socket_path: Path = setting(
        REQUIRED, path_value, "path", "", "Data socket; `admin.sock` lies beside it. Default: in the runtime folder",
    )  # fmt: skip
    socket_mode: int = setting(
        0o660, mode_value, "file mode", "0000 to 0777", "Who may connect: whoever may, can read and write every chunk",
    )  # fmt: skip
    socket_group: str | None = setting(
        None, text_value, "group", "", "Group of the sockets, so that engines of other users can connect",
    )  # fmt: skip
    socket_max_connections: int = setting(
        1024, count_value(1, 65536), "connections", "1 to 65536", "Bounds memory and descriptors; clients above miss",
    )  # fmt: skip
    ssd_paths: tuple[Path, ...] = setting(
        REQUIRED, paths_value, "folders", "", "One volume each, one a device; `[]` (or `none`) = no SSD tier. "
        "Default: `ssd` in the state folder",
    )  # fmt: skip
    ssd_size: str = setting(
        "auto", auto_share_value, "size or % of free space", "64MiB and up",
        "Cap of each volume. `auto`: 64 GiB, or half of the file system's free space where that is less",
    )  # fmt: skip
    ssd_free_space_floor: str = setting(
        "5%", share_value, "size or % of the file system", "",
        "Space that is left to others: below it nothing new is allocated", reload=True,
    )  # fmt: skip
    ssd_write_bytes_per_second: int = setting(
        0, size_value, "size a second", "0 = no limit", "Write budget of all volumes; above it chunks stay in DRAM",
        reload=True,
    )  # fmt: skip
    ssd_write_bytes_per_day: int = setting(
        0, size_value, "size a day", "0 = no limit", "The same over a day: SSDs wear out by bytes written", reload=True,
    )  # fmt: skip
    ssd_io_threads: int = setting(
        16, count_value(1, 64), "threads", "1 to 64", "Some hash while others keep the device busy: 16 fill one NVMe",
    )  # fmt: skip
    ssd_direct: str = setting(
        "auto", choice_value("auto", "always", "never"), "", "auto, always, never",
        "O_DIRECT. `auto` falls back to buffered I/O where the file system has none, and says so in `status`",
    )  # fmt: skip
    lease_ttl: float = setting(
        30.0, seconds_value(0.1, 3600), "seconds", "0.1 to 3600",
        "An engine that neither renews nor releases loses its lease after this (late reads are found out)", reload=True,
    )  # fmt: skip
    policy_name: str = setting("lru", choice_value("lru"), "", "lru", "Which chunks are evicted first")
    shutdown_timeout: float = setting(
        20.0, seconds_value(0, 3600), "seconds", "0 to 3600",
        "SIGTERM writes dirty chunks to SSD until this is over, then stops anyway", reload=True,
    )  # fmt: skip
    log_level: str = setting(
        "info", choice_value("debug", "info", "warning", "error"), "", "debug, info, warning, error",
        "How much is logged", reload=True,
    )  # fmt: skip
    log_format: str = setting("text", choice_value("text", "json"), "", "text, json", "One line an event", reload=True)

    notify_socket: str | None = None
    """$NOTIFY_SOCKET: where systemd waits for READY."""
    file: Path | None = None
    """The TOML file that was read, if any."""
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Setting name -> `flag`, `environment NAME` or `file PATH`, for those that are not defaults."""

    @classmethod
    def load(
        cls, path: Path | None = None, environ: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
    ) -> Config:
        """Read and check all sources.

        path: a TOML file, which must exist; None = $KVSTORE_CONFIG, else the first default file that exists, else none.
        environ: None = the process's. flags: setting name -> value; None values are "not given".
        Raises Invalid with one sentence that names the source, the setting and, for a typing error, the nearest name.
        """
        environ = os.environ if environ is None else environ
        found: dict[str, tuple[str, Any]] = {}
        path = path or _config_file(environ)
        if path is not None:
            found |= {name: (f"file {path}", value) for name, value in _read_file(path).items()}
        found |= {name: (f"environment {variable}", environ[variable]) for name, variable in _variables(environ)}
        found |= {name: ("flag", value) for name, value in (flags or {}).items() if value is not None}
        values: dict[str, Any] = {
            "socket_path": runtime_folders(environ)[0] / SOCKET_NAME,
            "ssd_paths": (state_folder(environ) / "ssd",),
        }
        for name, (origin, value) in found.items():
            row = SETTINGS.get(name)
            if row is None:
                raise Invalid(f"{origin}: there is no setting {name!r}{nearest(name, SETTINGS)}")
            try:
                values[row.field] = row.parse(value)
            except Invalid as error:
                raise Invalid(f"{origin}: {name}: {error}") from error
        origins = {name: origin for name, (origin, _) in found.items()}
        return cls(**values, notify_socket=environ.get("NOTIFY_SOCKET"), file=path, origins=origins)

    @property
    def admin_path(self) -> Path:
        return admin_path_of(self.socket_path)

    def origin(self, name: str) -> str:
        return self.origins.get(name, "default")

    def value(self, name: str) -> Any:
        return getattr(self, SETTINGS[name].field)

    def client_socket_path(self) -> Path:
        """Where a client finds the daemon: the configured socket, else the first default one that exists."""
        return self.socket_path if "socket.path" in self.origins else default_socket_path()

    def differing(self, other: Config) -> list[Setting]:
        """Settings whose values are not equal, in the table's order."""
        return [row for row in SETTINGS.values() if self.value(row.name) != other.value(row.name)]


def _rows() -> dict[str, Setting]:
    rows = {}
    for field in dataclasses.fields(Config):
        if field.metadata:
            section, _, rest = field.name.partition("_")
            about = dict(field.metadata)
            many = about["parse"] is paths_value
            rows[f"{section}.{rest}"] = Setting(f"{section}.{rest}", many=many, **about)
    return rows


SETTINGS: Mapping[str, Setting] = _rows()
"""The table, in the order in which it is documented."""


def _read_file(path: Path) -> dict[str, Any]:
    """Setting name -> value as TOML has it. What is no setting in a section is kept as a name, to be refused.

    An empty table of a known section says nothing and is fine.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Invalid(f"file {path}: {(error.strerror or str(error)).lower()}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"file {path}: not valid TOML: {error}") from error
    flat: dict[str, Any] = {}
    for section, content in tables.items():
        if isinstance(content, dict) and (content or section in {name.split(".")[0] for name in SETTINGS}):
            flat |= {f"{section}.{name}": value for name, value in content.items()}
        else:
            flat[section] = content
    return flat


def _variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """(setting name, variable). A misspelt name is an error; others are not ours.

    Kubernetes sets KVSTORE_PORT, KVSTORE_SERVICE_HOST and the like for a service called `kvstore`: those must pass.
    """
    by_variable = {row.variable: name for name, row in SETTINGS.items()}
    out = []
    for variable in environ:
        if variable in by_variable:
            out.append((by_variable[variable], variable))
        elif variable.startswith(PREFIX) and variable != CONFIG_VARIABLE:
            hint = nearest(variable, by_variable, cutoff=0.85)
            if hint:
                raise Invalid(f"environment: there is no setting {variable!r}{hint}")
    return out


def _config_file(environ: Mapping[str, str]) -> Path | None:
    if environ.get(CONFIG_VARIABLE):
        return Path(environ[CONFIG_VARIABLE])
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    for path in (home / "kvstore" / "kvstore.toml", Path("/etc/kvstore/kvstore.toml")):
        if os.access(path, os.R_OK):
            return path
    return None


def runtime_folders(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Folders in which a daemon of this user, or of the machine, puts its sockets; the daemon takes the first.

    $RUNTIME_DIRECTORY (set by systemd for the unit), $XDG_RUNTIME_DIR/kvstore where that exists, /run/kvstore for root,
    and for others a folder of their own under the temporary directory, which is to be made with mode 0700.
    """
    environ = os.environ if environ is None else environ
    folders = []
    if environ.get("RUNTIME_DIRECTORY"):
        folders.append(Path(environ["RUNTIME_DIRECTORY"].split(":")[0]))
    if environ.get("XDG_RUNTIME_DIR") and Path(environ["XDG_RUNTIME_DIR"]).is_dir():
        folders.append(Path(environ["XDG_RUNTIME_DIR"]) / "kvstore")
    if os.geteuid() != 0:
        folders.append(Path(tempfile.gettempdir()) / f"kvstore-{os.geteuid()}")
    return [*folders, Path("/run/kvstore")]


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """$STATE_DIRECTORY (systemd), $XDG_STATE_HOME/kvstore, /var/lib/kvstore for root, ~/.local/state/kvstore.

    A user without a home of their own gets /var/tmp/kvstore-UID, which is to be made with mode 0700.
    """
    environ = os.environ if environ is None else environ
    if environ.get("STATE_DIRECTORY"):
        return Path(environ["STATE_DIRECTORY"].split(":")[0])
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "kvstore"
    if os.geteuid() == 0:
        return Path("/var/lib/kvstore")
    home = Path(environ.get("HOME") or "/nonexistent")
    if os.access(home, os.W_OK):
        return home / ".local" / "state" / "kvstore"
    return Path(f"/var/tmp/kvstore-{os.geteuid()}")


def default_socket_path(environ: Mapping[str, str] | None = None) -> Path:
    """The socket that a client of this user means: $KVSTORE_SOCKET_PATH, else the first that exists or the first.

    Sockets in folders that belong to neither root nor this user are passed over. Where no socket exists,
    $RUNTIME_DIRECTORY does not count: an engine that runs as a unit has one of its own, where no daemon ever listens.
    """
    environ = os.environ if environ is None else environ
    if environ.get("KVSTORE_SOCKET_PATH"):
        return Path(environ["KVSTORE_SOCKET_PATH"])
    candidates = [folder / SOCKET_NAME for folder in runtime_folders(environ)]
    for path in candidates:
        if is_socket(path):
            return path
    return runtime_folders({**environ, "RUNTIME_DIRECTORY": ""})[0] / SOCKET_NAME


def default_admin_path(environ: Mapping[str, str] | None = None) -> Path:
    """The admin socket beside `default_socket_path()`."""
    return admin_path_of(default_socket_path(environ))


def admin_path_of(socket_path: Path) -> Path:
    return socket_path.with_name(ADMIN_NAME)


def is_socket(path: Path) -> bool:
    """Whether `path` is a socket in a folder of root or this user."""
    try:
        return stat.S_ISSOCK(path.stat().st_mode) and path.parent.stat().st_uid in (0, os.geteuid())
    except OSError:
        return False
