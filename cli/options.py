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

    def silent(self) -> Unreachable:
        """The daemon accepted a connection and then did not answer."""
        return Unreachable(f"the daemon on {self.socket_path} does not answer", "look at its log")

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
            config = Config.load(config_path)
            explicit = socket_path is not None or config.origin("socket.path") != "default"
            function(output, Daemon(socket_path or config.client_socket_path(), explicit), **arguments)

        return command(name, **settings)(CONFIG_OPTION(SOCKET_OPTION(run)))

    return decorate


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
        text = ". ".join(part for part in (row.reason, f"[{row.range}]" if row.range else "") if part)
        option = click.option(
            row.flag, row.field, metavar=(row.unit or "WORD").split()[0].upper(), multiple=row.many, help=text
        )
        decorated = option(decorated)
    return decorated
