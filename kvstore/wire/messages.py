"""Every message of the data and admin sockets, as typed MessagePack arrays (no extension types, no unknown keys).

Fields are appended, never reordered: a peer of protocol N-1 sends fewer, and defaults fill the rest (docs/formats.md).
Keys travel as one bytes field of n x 32; results as packed arrays in key order. Sizes are bytes, times seconds.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from kvstore.namespace import BaseNamespace, RequestIdentity

PROTOCOL = 1
PROTOCOL_MIN = 1
"""The daemon serves protocols PROTOCOL_MIN..PROTOCOL (N and N-1)."""
MAX_KEYS = 4096
"""Keys a request: keeps one request below 2 ms of the loop."""
MAX_FRAME_BYTES = 1 << 20
MAX_IN_FLIGHT = 64
"""Requests of one connection without an answer."""


class Message(msgspec.Struct, array_like=True, frozen=True):
    KIND: ClassVar[int] = 0
    ONE_WAY: ClassVar[bool] = False
    """True where no answer is sent."""


class Failed(Message, frozen=True):
    """The answer to a request that failed as a whole. `code` is one of kvstore.errors."""

    KIND: ClassVar[int] = 1
    code: str
    message: str


class Done(Message, frozen=True):
    """The answer where success is all there is to say."""

    KIND: ClassVar[int] = 2


class Hello(Message, frozen=True):
    """First frame of a connection, before anything else."""

    KIND: ClassVar[int] = 3
    protocol_min: int
    protocol_max: int
    session: bytes
    """16 random bytes, shared by all processes of one engine instance."""
    label: str = ""
    """Shown in `status`: engine name and rank."""
    want_fds: bool = True
    """Send the arena and control descriptors with the answer (SCM_RIGHTS, in that order)."""
    quiet: bool = False
    """No thread of this process writes into slots it reserved on connections that have ended: they may be reused."""


class Welcome(Message, frozen=True):
    KIND: ClassVar[int] = 4
    protocol: int
    arena_id: bytes
    """16 random bytes of this arena; another value after a restart: unmap the old one."""
    arena_bytes: int
    control_bytes: int
    page_kind: str
    max_keys: int = MAX_KEYS
    max_frame_bytes: int = MAX_FRAME_BYTES
    max_in_flight: int = MAX_IN_FLIGHT
    lease_ttl_s: float = 30.0
    version: str = ""


class OpenRoot(Message, frozen=True):
    KIND: ClassVar[int] = 5
    namespace: BaseNamespace
    identity: RequestIdentity


class RootOpened(Message, frozen=True):
    """`root` is a handle of this session, usable on all its connections; `digest` is the identity it stands for."""

    KIND: ClassVar[int] = 6
    root: int
    digest: bytes


class Lookup(Message, frozen=True):
    """Pools with rule `all`: the answer stops at the first absent key. Other pools: one tier a key."""

    KIND: ClassVar[int] = 7
    root: int
    pool: int
    keys: bytes


class Tiers(Message, frozen=True):
    KIND: ClassVar[int] = 8
    tiers: bytes
    """uint8 Tier, one a key up to where the answer stops."""


class Lease(Message, frozen=True):
    """Pin the leading run (rule `all`) or each present chunk (other rules) in DRAM; starts fills from lower tiers."""

    KIND: ClassVar[int] = 9
    root: int
    pool: int
    keys: bytes
    layerwise: bool = False
    """Fill the first part group of every chunk first."""


class Leased(Message, frozen=True):
    """`lease` is 0 when nothing was leased."""

    KIND: ClassVar[int] = 10
    lease: int
    codes: bytes
    """uint8 Load, one a key."""
    offsets: bytes
    """uint64-LE arena offset, one a key (undefined for misses)."""
    generations: bytes
    """uint64-LE generation that the slot must still have after the copy, one a key."""


class Release(Message, frozen=True):
    """`copied_bytes` and `seconds` say what the caller loaded and how long that took (0: nothing)."""

    KIND: ClassVar[int] = 11
    ONE_WAY: ClassVar[bool] = True
    lease: int
    copied_bytes: int = 0
    seconds: float = 0.0


class Renew(Message, frozen=True):
    """Answer: Done, or Failed(closed) when the lease has expired."""

    KIND: ClassVar[int] = 12
    lease: int


class Reserve(Message, frozen=True):
    """Ask for writable slots. `parents` as long as `keys`; NO_PARENT for a chain's first chunk."""

    KIND: ClassVar[int] = 13
    root: int
    pool: int
    shard: int
    keys: bytes
    parents: bytes
    durable: bool = False
    """A durable Commit will follow, also for keys that exist: the reservation is made even where nothing is granted."""


class Reserved(Message, frozen=True):
    """`reservation` is 0 when nothing was granted."""

    KIND: ClassVar[int] = 14
    reservation: int
    codes: bytes
    """uint8 Ack, one a key: GRANTED, EXISTS or REFUSED_*."""
    offsets: bytes
    """uint64-LE arena offset of the chunk's slot, one a key (undefined unless GRANTED)."""


class Commit(Message, frozen=True):
    """Publish keys [first, first + count) of a reservation, after the copies have completed; each once.

    `durable`: the answer comes when they are synced to SSD.
    """

    KIND: ClassVar[int] = 15
    reservation: int
    first: int
    count: int
    durable: bool = False
    hold: bool = False
    """Keep the chunks pinned until Abort(reservation): a client that splits a batch acknowledges it as a whole."""


class Committed(Message, frozen=True):
    KIND: ClassVar[int] = 16
    codes: bytes
    """uint8 Ack, one a key of the range; keys that were not GRANTED repeat their answer."""


class Abort(Message, frozen=True):
    """End a reservation: give back what is not committed (the caller writes no more into it), unpin what was held."""

    KIND: ClassVar[int] = 17
    ONE_WAY: ClassVar[bool] = True
    reservation: int


class Pin(Message, frozen=True):
    """Keep resident chunks in DRAM until unpinned, the session ends or `ttl_s` is over. Answer: Leased, no offsets."""

    KIND: ClassVar[int] = 18
    root: int
    pool: int
    keys: bytes
    ttl_s: float = 60.0


class Unpin(Message, frozen=True):
    KIND: ClassVar[int] = 19
    lease: int


class Stats(Message, frozen=True):
    KIND: ClassVar[int] = 20


class StatsAnswer(Message, frozen=True):
    """Plain JSON values."""

    KIND: ClassVar[int] = 21
    stats: dict[str, Any]


class Ping(Message, frozen=True):
    KIND: ClassVar[int] = 22


class AdminCall(Message, frozen=True):
    """One verb of the admin socket: status, stat, ls, inspect, rm, purge, flush, config, reload."""

    KIND: ClassVar[int] = 30
    verb: str
    arguments: dict[str, str | int | float | bool | None] = {}


class AdminAnswer(Message, frozen=True):
    KIND: ClassVar[int] = 31
    result: dict[str, Any]


BY_KIND: dict[int, type[Message]] = {cls.KIND: cls for cls in Message.__subclasses__()}
