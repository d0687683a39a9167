"""A client process for the session tests: python server_child.py SOCKET SESSION_HEX.

Greets, opens a root, says `ready`, then obeys one command a line: `reserve HEXKEY`, `close N` (its Nth connection),
`connect`, `quiet` (a new connection that says so), `fork` (a process that inherits the connections and sleeps), `flood`
(requests whose answers it never reads).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from server_raw_client import RawClient

from kvstore.wire.frame import encode
from kvstore.wire.messages import Lease


def flood(client: RawClient) -> None:
    lease = encode(Lease(client.root, 0, os.urandom(32 * 1024)), 1)
    client.socket.settimeout(0.1)
    with contextlib.suppress(TimeoutError, BrokenPipeError):
        while True:
            client.socket.sendall(lease)


def main() -> None:
    path, session = Path(sys.argv[1]), bytes.fromhex(sys.argv[2])
    connections: list[RawClient] = []

    def connect(quiet: bool) -> None:
        client = RawClient(path)
        client.greet(session, "child", quiet)
        client.open_root()
        connections.append(client)

    connect(False)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        said = "done"
        if verb == "reserve":
            said = str(connections[-1].reserve(bytes.fromhex(words[0])).codes[0])
        elif verb == "close":
            connections[int(words[0])].close()
        elif verb in ("connect", "quiet"):
            connect(verb == "quiet")
        elif verb == "flood":
            flood(connections[-1])
        elif verb == "fork":
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            said = str(child)
        print(said, flush=True)


main()
