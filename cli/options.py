"""Options shared by commands, and the object that commands get from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvstore.cli.connection import TIMEOUT_S, Connection
from kvstore.cli.exit import Unreachable
from kvstore.cli.output import Output
from kvstore.config import SETTINGS, Config, admin_path_of
from kvstore.log import masked
from kvstore.settings import Setting

CONFIG_OPTION = click.option(
    "--config", "config_path", metavar="FILE", type=click.Path(path_type=Path),
    help="TOML file. Default: $KVSTORE_CONFIG, ~/.config/kvstore/kvstore.toml, /etc/kvstore/kvstore.toml.",
)  # fmt: skip
SOCKET_OPTION = click.option(
    "--socket", "socket_path", metavar="PATH", type=click.Path(path_type=Path),
    help="The daemon's data socket. Default: the configured one, else the first of the default ones that exists.",
)  # fmt: skip
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


class Daemon:
    """Where the daemon is, and how to talk to it."""

    def __init__(self, socket_path: Path, explicit: bool) -> None:
        self.socket_path = socket_path
        self.admin_path = admin_path_of(socket_path)
        self._start = f"kvstore serve --socket-path {socket_path}" if explicit else "kvstore serve"

    def call(self, verb: str, **arguments: str | int | float | bool | None) -> dict[str, Any]:
        """One admin verb. Raises Failure (unreachable, denied) and the daemon's own typed error."""
        with self.connect_admin() as connection:
            return connection.call(verb, **arguments)

    def connect_admin(self) -> Connection:
        return Connection(self.admin_path, self._start)

    def silent(self, why: str) -> Unreachable:
        """The daemon accepted a connection and then did not serve it."""
        return Unreachable(f"the daemon on {self.socket_path} does not serve: {why or 'no answer'}", "look at its log")

    def connect_data(self, timeout_s: float = TIMEOUT_S) -> Connection:
        return Connection(self.socket_path, self._start, timeout_s)


def command(name: str, **settings: Any) -> Callable[[Callable[..., None]], click.Command]:
    """A click command whose function gets an `output` first; it has `--json`."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def run(as_json: bool, **arguments: Any) -> None:
            function(Output(name, as_json), **arguments)

        decorated: Callable[..., Any] = JSON_OPTION(run)
        return click.command(name, click.Command, **settings)(decorated)

    return decorate


def daemon_command(name: str, **settings: Any) -> Callable[[Callable[..., None]], click.Command]:
    """As `command`, and the function gets the `daemon` that `--socket` or `--config` name second."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def run(output: Output, socket_path: Path | None, config_path: Path | None, **arguments: Any) -> None:
            daemon = Daemon(socket_path, True) if socket_path is not None else daemon_of(Config.load(config_path))
            function(output, daemon, **arguments)

        return command(name, **settings)(CONFIG_OPTION(SOCKET_OPTION(run)))

    return decorate


def daemon_of(config: Config) -> Daemon:
    """The daemon that a client with these settings means."""
    return Daemon(config.client_socket_path(), config.origin("socket.path") != "default")


def shown(row: Setting, value: object) -> str:
    """A value as it is written in a flag; secrets are masked."""
    if isinstance(value, (tuple, list)):
        return ":".join(map(str, value)) or "none"
    if row.unit == "file mode":
        return f"0{value:03o}"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(masked(row.name, value))


_METAVARS = {"": "WORD", "file mode": "MODE", "folders": "FOLDER"}


def setting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """One flag for each setting, from the table; the function gets them as `flags`: {setting name: value or None}."""

    @functools.wraps(function)
    def run(*outputs: Output, **arguments: Any) -> Any:
        flags = {row.name: arguments.pop(row.field) for row in SETTINGS.values()}
        given = {
            name: list(value) if isinstance(value, tuple) else value for name, value in flags.items() if value != ()
        }
        return function(*outputs, flags=given, **arguments)

    decorated: Callable[..., Any] = run
    for row in reversed(list(SETTINGS.values())):
        about = [row.range, f"default: {shown(row, row.default)}" if isinstance(row.default, (str, int, float)) else ""]
        notes = "; ".join(part for part in about if part)
        metavar = _METAVARS.get(row.unit, row.unit.split(" ")[0].upper())
        text = f"{row.reason}. [{notes}]" if notes else row.reason
        option = click.option(row.flag, row.field, metavar=metavar, multiple=row.many, help=text)
        decorated = option(decorated)
    return decorated
