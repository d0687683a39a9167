"""One-byte answers of the data path and the reasons behind them: the vocabulary of wire, ledger and metrics.

Numbers are part of the wire format (docs/formats.md): append, never renumber.
"""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """Where a chunk is, best place first. The answer of `lookup`, one a key."""

    NONE = 0
    DRAM = 1
    SSD = 2
    REMOTE = 3
    PENDING = 4
    """Remote presence is not confirmed yet: counts as absent, ask again."""


class Ack(IntEnum):
    """The answer to a store, one a key. STORED_* and EXISTS mean that the bytes are kept now.

    GRANTED is the intermediate answer of `reserve`: a writable slot, nothing stored yet.
    """

    GRANTED = 1
    STORED_DRAM = 2
    """In DRAM only: no SSD tier, or its budget or space forbade the write."""
    STORED_WRITE_BEHIND = 3
    """In DRAM, the write to SSD is queued and the chunk is not evicted before it ends."""
    STORED_SSD = 4
    """On SSD, synced (durable=True)."""
    EXISTS = 5
    """These bytes were already stored under this key; nothing was copied or changed."""
    PARTIAL = 6
    """This shard is committed; the chunk becomes visible once its other shards are."""
    REFUSED_FULL = 16
    REFUSED_BACKPRESSURE = 17
    REFUSED_ORPHAN = 18
    REFUSED_QUOTA = 19
    REFUSED_INVALID = 20
    REFUSED_UNAVAILABLE = 21
    """The daemon was not reached, or not in time. The chunk may or may not have been kept."""
    REFUSED_CLOSED = 22
    """Draining, the reservation is gone, or the root was purged meanwhile."""

    @property
    def stored(self) -> bool:
        """True when the whole chunk is kept and visible."""
        return Ack.STORED_DRAM <= self <= Ack.EXISTS

    @property
    def refused(self) -> bool:
        return self >= Ack.REFUSED_FULL


class Load(IntEnum):
    """The answer to a lease or get, one a key."""

    DRAM = 1
    """Resident: the bytes can be copied now."""
    SSD = 2
    """Being filled from SSD: wait for its parts."""
    REMOTE = 3
    MISS_UNKNOWN = 16
    """Not stored under this identity (never, or evicted, or removed)."""
    MISS_FULL = 17
    """Stored, but no arena slot was free to promote it into."""
    MISS_QUOTA = 18
    """The session or all sessions together pin too much already."""
    MISS_IO = 19
    """The tier failed or did not answer."""
    MISS_CORRUPT = 20
    """Proven corruption, where the daemon's answer says so. A fill that fails is MISS_IO whatever the cause: shared
    memory tells only that it failed; the ledger (`kvstore inspect`) and the log have the reason."""
    MISS_STALE = 21
    """The slot was taken over while it was read (generation changed)."""
    MISS_DEADLINE = 22
    MISS_UNAVAILABLE = 23
    """The daemon was not reached, or its breaker is open."""
    MISS_INVALID = 24
    """The caller's key or buffer does not fit the layout."""
    MISS_AFTER_GAP = 25
    """Present perhaps, but an earlier key of the chain was not: not looked at."""

    @property
    def hit(self) -> bool:
        return self < Load.MISS_UNKNOWN


class Gone(IntEnum):
    """Why a chunk left a tier or the system: evictions, drops and quarantines."""

    CAPACITY = 1
    """Chosen by the policy to make room."""
    TAKEOVER = 2
    """Its segment was given to another slot size."""
    ORPHAN = 3
    """Its parent left the system, so it could not be reached."""
    REMOVED = 4
    PURGED = 5
    CORRUPT = 6
    IO_ERROR = 7
    SSD_FULL = 8
    """The write to SSD was dropped: no slot and nothing to evict."""
    SSD_BUDGET = 9
    """The write to SSD was dropped: write budget."""
    ABORTED = 10
    """Its writer gave up or died before the commit."""
    VOLUME_LOST = 11
    DUPLICATE = 12
    """Another session committed the same chunk first."""
