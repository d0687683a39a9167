"""The entry point: finds the command, and turns every error into one sentence and an exit code.

A command is one file in this folder with a click command named as in COMMANDS; it is imported only when it is used.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import click

from kvstore import __version__
from kvstore.cli.exit import Exit, Failure, failure_of
from kvstore.cli.output import SCHEMA
from kvstore.errors import KVStoreError
from kvstore.settings import nearest

COMMANDS: dict[str, str] = {
    "serve": "serve:serve",
    "status": "status:status",
    "stat": "stat:stat",
    "ping": "ping:ping",
    "put": "put:put",
    "get": "get:get",
    "ls": "ls:ls",
    "inspect": "inspect:inspect",
    "rm": "rm:rm",
    "purge": "purge:purge",
    "flush": "flush:flush",
    "reload": "reload:reload",
    "config": "config:config",
    "fsck": "fsck:fsck",
    "version": "version:version",
}
"""Name -> `file:object`, in the order of the help text."""


class LazyGroup(click.Group):
    """Imports a command when it is asked for: `kvstore ping` need not load the database library."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            hint = nearest(cmd_name, COMMANDS)
            raise click.UsageError(f"there is no command {cmd_name!r}{hint}", ctx)
        file, name = COMMANDS[cmd_name].split(":")
        found = getattr(importlib.import_module(f"kvstore.cli.{file}"), name)
        assert isinstance(found, click.Command)
        return found


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 error, 2 usage, 3 no daemon, 4 not found, 5 degraded, 6 denied, 7 corruption.",
)
@click.version_option(__version__, message="kvstore %(version)s")
def cli() -> None:
    """Keeps the KV cache of LLM engines in shared memory and on SSD, and gives it back.

    \b
    Start a daemon:         kvstore serve
    See how it does:        kvstore status
    Watch it work:          kvstore stat -i 1
    """


def main() -> None:
    """Run the command line and exit with one of `Exit`."""
    try:
        code = cli.main(prog_name="kvstore", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        code = _report(error)
    except click.Abort:
        code = 130
    except (KVStoreError, OSError) as error:
        code = _closed_pipe() if isinstance(error, BrokenPipeError) else _report(failure_of(error))
    sys.exit(code if isinstance(code, int) else 0)


def _report(error: click.ClickException) -> int:
    """One sentence on standard error; with `--json` also a document, so that a parser finds one in any case."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        print(error.format_message(), file=sys.stderr)
        return Exit.USAGE
    hint = error.hint if isinstance(error, Failure) else ""
    code = error.code if isinstance(error, Failure) else Exit(error.exit_code)
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        hint = hint or f"see: {error.ctx.command_path} --help"
    print(f"kvstore: {message.rstrip('.')}{f'; {hint}' if hint else ''}", file=sys.stderr)
    if "--json" in sys.argv[1:]:
        about = {"code": code.name.lower(), "exit": int(code), "message": message, "hint": hint}
        print(json.dumps({"schema": SCHEMA, "error": about}, ensure_ascii=False))
    return int(code)


def _closed_pipe() -> int:
    """The reader of our output went away (`kvstore ls | head`): nothing to tell, and Python must not flush again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.ERROR
