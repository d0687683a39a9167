"""The composition root: builds arena, volumes, manager and server from the settings, and lives until told to stop.

Order at start: what can be refused cheaply first (memory, folders, locks), the arena's pages last, then the sockets,
then READY. SIGTERM and SIGINT drain within `shutdown.timeout` (a second one stops at once); SIGHUP reloads. Before
READY, SIGTERM just ends the process: there is nothing to write yet.
Not covered: what the parts do (manager, server, backends).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, cast

import uvloop

from kvstore import __version__, log
from kvstore.arena import Arena
from kvstore.clock import MonotonicClock
from kvstore.config import SETTINGS, Config
from kvstore.errors import Full, InUse, Invalid, KVStoreError, Unavailable
from kvstore.heap import use_one_malloc_arena
from kvstore.host import arena_bytes, existing_parent, floor_bytes, make_folder, read_memory, volume_bytes
from kvstore.ledger import Ledger
from kvstore.manager import Manager, ManagerSettings
from kvstore.notify import Notifier
from kvstore.scheduling import ask_for_short_slices
from kvstore.server import Server
from kvstore.units import format_size

SWITCH_INTERVAL_S = 0.0005
"""A busy pool thread delays the loop 5 ms with the default of 5 ms, and 0.7 ms with this (measured)."""
SERVER_SHARE = 0.25
"""Of the time to stop: for answers that clients wait for; the rest is for writing to SSD."""
PROGRESS_S = 1.0
EXTEND_S = 60.0
"""Start and stop tell systemd that they go on, and need up to this long for the next step."""
_log = logging.getLogger(__name__)


def serve(load: Callable[[], Config]) -> None:
    """Run until SIGTERM. `load` reads all sources of settings: once now, and again at each reload.

    Raises KVStoreError with one sentence where the daemon cannot start; nothing is left behind then.
    """
    config = load()
    log.configure(config.log_level, cast(Literal["text", "json"], config.log_format))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    use_one_malloc_arena()
    os.umask(0o077)
    _raise_file_limit()
    notifier = Notifier(config.notify_socket)
    size_bytes = arena_bytes(config.arena_size, config.arena_huge_pages, read_memory())
    _prepare_runtime_folder(config)
    with ExitStack() as stack:
        volumes, left_out = _open_volumes(config, stack)
        arena = stack.enter_context(_create_arena(config, size_bytes, notifier))
        daemon = Daemon(config, load, notifier, arena, volumes, left_out)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(daemon.run())


class Daemon:
    """What lives on the loop. Loop thread only."""

    def __init__(
        self,
        config: Config,
        load: Callable[[], Config],
        notifier: Notifier,
        arena: Arena,
        volumes: list[Any],
        left_out: list[str],
    ) -> None:
        self._config = config
        self._load = load
        self._notifier = notifier
        self._arena = arena
        self._volumes = volumes
        self._left_out = left_out
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal says stop, then drain. Raises KVStoreError where the sockets cannot be had."""
        ask_for_short_slices()
        loop, config, ledger = asyncio.get_running_loop(), self._config, Ledger()
        self._notifier.status("recovering the volumes", EXTEND_S)
        self._manager = manager = Manager(
            self._arena, self._volumes, ledger=ledger, clock=MonotonicClock(), loop=loop, settings=_settings(config),
            left_out=self._left_out,
        )  # fmt: skip
        try:
            await manager.start()
            server = Server(
                manager, config.socket_path, config.admin_path, mode=config.socket_mode, group=config.socket_group,
                max_connections=config.socket_max_connections, ledger=ledger,
                admin_verbs={"reload": lambda arguments: self.reload(), "config": lambda arguments: self.show()},
            )  # fmt: skip
            for number in (signal.SIGTERM, signal.SIGINT):  # first: whoever sees the socket may stop us
                loop.add_signal_handler(number, self._stopping)
            await server.start()
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
            self._say_ready()
            await self._stop.wait()
            await self._drain(server)
        finally:
            manager.close()

    def reload(self) -> dict[str, Any]:
        """Read the settings again and apply what can be. Raises Invalid, and then nothing has changed."""
        new = self._load()
        differing = self._config.differing(new)
        changed = [row for row in differing if row.reload]
        config = dataclasses.replace(self._config, **{row.field: new.value(row.name) for row in changed})
        self._manager.reconfigure(_settings(config))
        self._config = config
        log.configure(self._config.log_level, cast(Literal["text", "json"], self._config.log_format))
        answer = {
            "changed": [row.name for row in changed],
            "needs_restart": [row.name for row in differing if not row.reload],
        }
        _log.info("settings reloaded", extra={"fields": {name: ",".join(rows) or "-" for name, rows in answer.items()}})
        return answer

    def show(self) -> dict[str, Any]:
        """The settings in use."""
        values = {name: log.masked(name, _plain(self._config.value(name))) for name in SETTINGS}
        return {"file": _plain(self._config.file), "settings": values}

    def _say_ready(self) -> None:
        arena, config = self._arena, self._config
        volumes = " ".join(map(str, config.ssd_paths)) or "none"
        text = f"serving on {config.socket_path}, arena {format_size(arena.size_bytes)} ({arena.page_kind})"
        fields = {
            "version": __version__, "socket": config.socket_path, "arena": format_size(arena.size_bytes),
            "pages": arena.page_kind, "volumes": volumes, "pid": os.getpid(),
        }  # fmt: skip
        _log.info("serving", extra={"fields": fields})
        for note in arena.notes:
            _log.info("arena: %s", note)
        self._notifier.ready(text)

    def _stopping(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _hang_up(self) -> None:
        self._notifier.reloading()
        try:
            self.reload()
            self._notifier.ready("settings reloaded")
        except KVStoreError as error:
            _log.error("reload refused, the old settings stay: %s", error)
            self._notifier.ready(f"reload refused, the old settings stay: {error}")

    async def _drain(self, server: Server) -> None:
        limit_s, start_s = self._config.shutdown_timeout, time.monotonic()
        self._notifier.stopping("writing what is only in memory to SSD")
        self._notifier.status("draining", limit_s + EXTEND_S)
        _log.info("stopping", extra={"fields": {"within_s": limit_s}})
        cut = await server.stop(limit_s * SERVER_SHARE)
        left_s = max(0.0, limit_s - (time.monotonic() - start_s))
        drain = asyncio.ensure_future(self._manager.drain(left_s))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not drain.done():
            drain.cancel()
        await asyncio.wait({drain})
        fields: dict[str, object] = {"took_s": time.monotonic() - start_s, "requests_cut": cut}
        if drain.cancelled():
            _log.warning("stopped in a hurry: what was only in memory is lost", extra={"fields": fields})
        elif unwritten := drain.result():
            _log.warning("stopped with chunks that were not written", extra={"fields": fields | {"chunks": unwritten}})
        else:
            _log.info("stopped", extra={"fields": fields})


def _raise_file_limit() -> None:
    """Up to what the administrator allows: segments (a file each) and connections (two descriptors each) need many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _settings(config: Config) -> ManagerSettings:
    floors = [floor_bytes(config.ssd_free_space_floor, path) for path in config.ssd_paths]
    return ManagerSettings(
        lease_ttl_s=config.lease_ttl,
        write_bytes_per_s=config.ssd_write_bytes_per_second,
        write_bytes_per_day=config.ssd_write_bytes_per_day,
        io_threads=config.ssd_io_threads,
        free_space_floor_bytes=min(floors, default=0),
        policy=config.policy_name,
    )


def _prepare_runtime_folder(config: Config) -> None:
    """Make the sockets' folder, and refuse at once where a daemon serves there: before any memory is taken.

    Two that start at the same moment are told apart by the server's lock.
    """
    folder = config.socket_path.parent
    own = folder == Path("/run/kvstore") or config.origin("socket.path") != "default"
    private = make_folder(folder, 0o755 if own else 0o700)
    if private and config.socket_group is not None:
        _log.warning("socket.group is set, but the folder lets nobody else in", extra={"fields": {"folder": folder}})
    elif private and config.origin("socket.path") == "default":
        _log.info(
            "only this user can connect: the sockets are in a private folder", extra={"fields": {"folder": folder}}
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(config.socket_path))
        except OSError:
            return
    raise Unavailable(f"a daemon is serving on {config.socket_path} already: stop it, or set socket.path to another")


def _open_volumes(config: Config, stack: ExitStack) -> tuple[list[Any], list[str]]:
    """The volumes, and why others are left out: a disk that is full or read-only costs its own chunks only.

    What needs a decision stops the start: a folder that cannot be, is in use, or holds another format or damage.
    `stack` closes the volumes.
    """
    found = entry_points(group="kvstore.backends", name="ssd") if config.ssd_paths else ()
    if config.ssd_paths and not found:
        raise Invalid("the SSD backend is not installed: `pip install` kvstore again, or set ssd.paths to none")
    devices = Counter(existing_parent(path).stat().st_dev for path in config.ssd_paths)
    volumes: list[Any] = []
    left_out: list[str] = []
    for path in config.ssd_paths:
        make_folder(path)
        size_bytes = volume_bytes(config.ssd_size, path, devices[path.stat().st_dev])
        try:
            volume = next(iter(found)).load().open(path, size_bytes, direct=config.ssd_direct)
        except InUse:
            raise
        except (Unavailable, Full) as error:
            left_out.append(f"SSD volume {path} is left out: {error}")
            _log.error("%s", left_out[-1])
            continue
        stack.callback(volume.close)
        volumes.append(volume)
        fields = {"path": path, "cap": format_size(size_bytes), "direct": volume.direct}
        _log.info("volume opened", extra={"fields": fields})
        for note in volume.notes:
            _log.info("volume: %s", note, extra={"fields": {"path": path}})
    return volumes, left_out


def _create_arena(config: Config, size_bytes: int, notifier: Notifier) -> Arena:
    """Allocate and page in the arena: seconds a GiB on cold memory, so it tells how far it is."""
    told_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s < PROGRESS_S and done < total:
            return
        told_s = now_s
        text = f"filling the arena: {format_size(done)} of {format_size(total)}"
        notifier.status(text, EXTEND_S)
        if sys.stderr.isatty():
            print(f"\r{text}   ", end="\n" if done >= total else "", file=sys.stderr, flush=True)

    pages = cast(Literal["auto", "always", "never"], config.arena_huge_pages)
    return Arena.create(size_bytes, pages, progress)


def _plain(value: object) -> Any:
    """A value as MessagePack takes it."""
    if isinstance(value, Path):
        return str(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
