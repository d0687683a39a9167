"""One connection of the admin socket: AdminCall and nothing else, for the daemon's own user and root."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
import os
from collections.abc import Awaitable, Mapping
from typing import Any

from kvstore.errors import Denied, Invalid
from kvstore.server.hub import AdminVerb
from kvstore.server.protocol import Answer, FrameProtocol
from kvstore.wire.messages import AdminAnswer, AdminCall, Message

CHANGES = frozenset({"rm", "purge", "flush", "reload"})
"""Verbs that leave a line in the log with who asked."""


class AdminConnection(FrameProtocol):
    _greeted = False

    def handle(self, message: Message, request: int) -> Answer:
        peer = self.peer
        if peer.uid not in (0, os.geteuid()):
            self.end(
                request, Denied(f"user {peer.uid} may not administer this daemon: that is for its own user and root")
            )
            return None
        if not isinstance(message, AdminCall):
            self.end(request, Denied(f"{type(message).__name__} is a data verb: use the data socket"))
            return None
        if not self._greeted:
            self._greeted = True
            self.greeted()
        verb = self._verb(message.verb)
        self.hub.ledger.count("admin_requests_total", message.verb)
        if message.verb in CHANGES:
            self.hub.log.write(
                logging.INFO,
                "admin",
                "admin: %s %r asked by process %d, user %d",
                message.verb,
                message.arguments,
                peer.pid,
                peer.uid,
            )
        result = verb(message.arguments)
        if not inspect.isawaitable(result):
            return AdminAnswer(self._finished(message.verb, result))
        task = asyncio.ensure_future(self._finish(message.verb, result))
        self.hub.own(task)
        return task

    def _verb(self, name: str) -> AdminVerb:
        manager = self.hub.manager
        verbs: dict[str, AdminVerb] = {
            "status": lambda arguments: manager.status(),
            "stat": lambda arguments: manager.stat(),
            "ls": manager.ls,
            "inspect": manager.inspect,
            "rm": manager.rm,
            "purge": manager.purge,
            "flush": lambda arguments: manager.flush(),
            **self.hub.admin_verbs,
        }
        verb = verbs.get(name)
        if verb is None:
            near = difflib.get_close_matches(name[:40], verbs, 1)
            hint = f": did you mean `{near[0]}`?" if near else f"; there are {', '.join(sorted(verbs))}"
            raise Invalid(f"no admin verb {name[:40]!r}{hint}")
        return verb

    async def _finish(self, verb: str, result: Awaitable[dict[str, Any]]) -> AdminAnswer:
        return AdminAnswer(self._finished(verb, await result))

    def _finished(self, verb: str, result: Mapping[str, Any]) -> dict[str, Any]:
        return {**result, "server": self.hub.status()} if verb == "status" else dict(result)
