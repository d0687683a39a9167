"""`kvstore version`: of this program, not of the daemon (that is in `status`)."""

from __future__ import annotations

import platform

from kvstore import __version__
from kvstore.cli.options import command
from kvstore.cli.output import Output
from kvstore.namespace import FORMAT_VERSION
from kvstore.wire.messages import PROTOCOL, PROTOCOL_MIN


@command("version")
def version(output: Output) -> None:
    """Print versions.

    Of this program, not of the daemon: those are in `kvstore ping` and `kvstore status`."""
    python = platform.python_version()
    output.document(
        version=__version__, protocol=PROTOCOL, protocol_min=PROTOCOL_MIN, chunk_format=FORMAT_VERSION, python=python
    )
    output.line(
        f"kvstore {__version__}, protocol {PROTOCOL_MIN} to {PROTOCOL}, chunk format {FORMAT_VERSION}, Python {python}"
    )
