"""Who holds what: sessions, leases and reservations. One record a thing, no parallel dicts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.index import Root, Series


@dataclass(slots=True, eq=False)
class Pending:
    """A chunk being written by the engine: one arena slot, shared by the ranks that write its shards."""

    series: Series
    key: bytes
    parent: bytes
    offset: int
    since_s: float
    writers: int = 0
    """Reservations that were granted it and have neither committed nor given up: they may still write into the slot."""
    committed: int = 0
    """Bit mask of committed shards."""
    taken: int = 0
    """Bit mask of shards that somebody has reserved."""
    over: bool = False
    """Given up or refused: the slot goes back when the last writer lets go."""


@dataclass(slots=True, eq=False)
class Reservation:
    number: int
    owner: int
    """The process that may write: limbo ends when it is gone."""
    series: Series
    epoch: int
    """`Root.epoch_sequence` when it was made."""
    shard: int
    keys: bytes
    codes: bytearray
    """The answers so far, one a key (Ack)."""
    chunks: list[Pending | None]
    """None where nothing was granted, or the chunk is committed or given back."""
    open: int = 0
    """How many are not None."""
    pinned: list[int] = field(default_factory=list)
    """Rows answered EXISTS or committed with `hold`: pinned until the reservation ends."""
    held_bytes: int = 0
    """Of `pinned`: part of the session's share."""
    lasting: bool = False
    """Chunks were committed with `hold`: it lasts until it is ended, not only until all is committed."""


@dataclass(slots=True, eq=False)
class Lease:
    number: int
    rows: npt.NDArray[np.intp]
    """May name a row twice; it is then pinned twice."""
    expires_s: float
    size_bytes: int


@dataclass(slots=True, eq=False)
class Session:
    """One engine instance."""

    name: bytes
    label: str = ""
    roots: dict[int, Root] = field(default_factory=dict)
    """Opened, by handle."""
    leases: dict[int, Lease] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    joint: dict[tuple[int, bytes], Pending] = field(default_factory=dict)
    """(series, key) -> chunk that several ranks are writing."""
    held_bytes: int = 0
    """By leases, pins and reservations: bounded to its share of the arena."""
    connected: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """Shares of the arena, and times. Sources: architecture, arena rules."""

    session_share: float = 0.5
    all_share: float = 0.8
    dirty_share: float = 0.25
    ahead_share: float = 1 / 16
    """Evicted ahead of need, at most."""
    lease_ttl_s: float = 30.0
    sick_s: float = 30.0
    """How long a chunk whose tier failed to deliver it stays hidden."""
    leases: int = 4096
    """Leases and reservations of one session."""
    roots: int = 65536
    """Roots that all sessions together may open."""
