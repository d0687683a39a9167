"""The verbs, on one pool of one root. `batch_get` and `batch_set` are the ones to start with.

None of them raises: bad input, a full arena, a daemon that is slow, frozen, gone or replaced are answers, one a key.
None waits longer than the client's deadline (plus the bytes of the batch over the expected rate).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.client.caller import DURABLE_S, Caller
from kvstore.client.connection import Connection
from kvstore.client.copying import Buffer, Buffers
from kvstore.client.granting import grant_lease, grant_pin, grant_reservation
from kvstore.client.lease import LeaseView, PinHandle
from kvstore.client.link import Link
from kvstore.client.loading import Call, Shape, load
from kvstore.client.outcomes import (
    ACKS,
    LOADS,
    TIERS,
    Selection,
    ack_for,
    acks,
    load_for,
    loads,
    malformed,
    repeated,
    settle,
)
from kvstore.client.reservation import ReservationView
from kvstore.client.storing import store
from kvstore.codes import Ack, Load, Tier
from kvstore.errors import Closed, Invalid, KVStoreError, Unavailable
from kvstore.keys import chain_parents
from kvstore.layout import SlotLayout
from kvstore.namespace import BaseNamespace, RequestIdentity
from kvstore.wire.messages import Abort, OpenRoot, RootOpened, Tiers
from kvstore.wire.messages import Lookup as LookupRequest

WINDOWS = (64, 256, 1024, 4096)
"""Keys of the first requests of a look-up, the last repeating: a cold prompt costs one small request."""
ARENA_SHARE = 4
"""batch_get leases at most this part of the arena at a time: one session may hold half of it."""
COPY_PATIENCE = 4
"""Copies of what is there already are our own work, not a wait: they are cut off only where they run so many times
slower than the expected rate, for then recomputing is cheaper."""
LOOKUP_KEYS_PER_S = 500_000
"""Slower than any look-up measured: gives a long one the time that it needs beyond the client's deadline."""
_FIRST_MISS = int(Load.MISS_UNKNOWN)
_LOG = logging.getLogger("kvstore.client")


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer to `Root.lookup`."""

    run: int
    """Leading keys that are present."""
    packed: bytes
    """One byte a key, up to where the daemon stopped looking (for pools with rule `all`: the first absent key)."""

    @property
    def tiers(self) -> list[Tier]:
        return [TIERS.get(tier, Tier.NONE) for tier in self.packed]


class Root:
    """Made by `Client.root`. Thread-safe, cheap to keep, valid across restarts of the daemon. Needs no close."""

    def __init__(
        self,
        caller: Caller,
        namespace: BaseNamespace,
        identity: RequestIdentity,
        pool: int,
        layout: SlotLayout,
        digest: bytes,
    ) -> None:
        self.digest = digest
        """32 bytes: the identity that all chunks of this root are stored under."""
        self.pool = namespace.pools[pool]
        self.layout = layout
        self._caller = caller
        self._open = OpenRoot(namespace, identity)
        self._pool = pool
        self._handle: tuple[Link, int] | None = None
        self._told = False
        self._shapes = [
            Shape(pool, offset, size, len(parts), layout.slot_bytes)
            for offset, size, parts in zip(layout.shard_offsets, layout.shard_bytes, layout.part_ranges, strict=True)
        ]

    def batch_get(self, keys: Sequence[bytes], out_buffers: Sequence[Buffer], *, shard: int = 0) -> list[Load]:
        """Copy chunks into the caller's memory: one answer a key; a hit's buffer is filled, whole and right.

        Each buffer has exactly the shard's bytes: a writable numpy array, memoryview or raw (address, length), or a
        sequence of those, filled in order. A buffer whose answer is a miss may have been written to. Chunks in DRAM
        are copied at once, those on SSD as they become ready. Malformed or repeated keys and buffers that do not fit
        are MISS_INVALID. For pools with rule `all` nothing is looked at after the first absent key: MISS_AFTER_GAP.
        """
        shape = self._shape(shard)
        if shape is None or not self._caller.ready:
            return self._loaded(bytearray(len(keys)), Load.MISS_INVALID if shape is None else Load.MISS_UNAVAILABLE)
        buffers = Buffers(out_buffers, shape.size_bytes, writable=True)
        chosen = Selection(len(keys), malformed(keys) | repeated(keys) | buffers.unfit(len(keys)))
        asked, targets = chosen.of(keys), chosen.of(buffers.targets)
        codes = bytearray(len(asked))

        def get(call: Call, piece: slice, part: bytearray) -> bool:
            load(call, shape, asked[piece], targets[piece], self._caller.copier, part)
            return self.pool.rule != "all" or part[-1] < _FIRST_MISS

        error = self._in_pieces(codes, shape.size_bytes, get, shape.slot_bytes * ARENA_SHARE)
        settle(codes, Load.MISS_AFTER_GAP if error is None else load_for(error))
        return self._loaded(chosen.spread(codes), Load.MISS_INVALID)

    def batch_set(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes] | None,
        buffers: Sequence[Buffer],
        *,
        shard: int = 0,
        durable: bool = False,
    ) -> list[Ack]:
        """Store chunks: one answer a key, true when given. The buffers may be reused after the return.

        parents: the previous chunk's key for each, NO_PARENT for a chain's first; None: `keys` are one chain from its
        start. Buffers as for `batch_get`, and they may be read-only. `durable` waits until they are synced to SSD.
        Malformed or repeated keys and buffers that do not fit are REFUSED_INVALID, and cost others only as parents.
        """
        shape = self._shape(shard)
        if shape is None or not self._caller.ready:
            return self._stored(bytearray(len(keys)), Ack.REFUSED_INVALID if shape is None else Ack.REFUSED_UNAVAILABLE)
        kept = Buffers(buffers, shape.size_bytes, writable=False)
        above = chain_parents(keys) if parents is None else parents
        bad = malformed(keys) | repeated(keys) | kept.unfit(len(keys))
        parentless = malformed(above) | set(range(len(above), len(keys)))
        chosen = Selection(len(keys), bad | parentless)
        asked, ancestors, sources = chosen.of(keys), chosen.of(above), chosen.of(kept.targets)
        codes = bytearray(len(asked))

        def put(call: Call, piece: slice, part: bytearray) -> bool:
            # One reservation takes all that fits before anything is stored, so it cannot evict what it stored; several
            # could, and then the acknowledgement of the first would be false by the time it is given.
            hold = len(part) < len(codes)
            store(
                call, shape, shard, asked[piece], ancestors[piece], sources[piece], self._caller.copier, part,
                durable_s=DURABLE_S if durable else None, hold=hold,
            )  # fmt: skip
            return True

        error = self._in_pieces(codes, shape.size_bytes, put, 0)
        refused = Ack.REFUSED_UNAVAILABLE if error is None else ack_for(error)
        settle(codes, refused)
        settle(codes, refused, instead_of=Ack.GRANTED)
        answers = chosen.spread(codes)
        if parents is None:  # the child of a malformed key is well-formed itself, but nothing can be above it
            for i in parentless - bad:
                answers[i] = Ack.REFUSED_ORPHAN
        return self._stored(answers, Ack.REFUSED_INVALID)

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """Which keys are stored, and where; asks in growing windows and stops at the first that comes back short.

        A malformed key is absent. Nothing is pinned: a key that is present may be gone a moment later.
        """
        deadline_s = self._caller.until() + len(keys) / LOOKUP_KEYS_PER_S
        whole = self.pool.rule == "all"
        bad = malformed(keys)
        keys = keys[: min(bad)] if bad and whole else keys
        chosen = Selection(len(keys), set() if whole else bad)
        asked = chosen.of(keys)
        packed = bytearray()
        try:
            with self._call() as call:
                windows = iter(WINDOWS)
                window = WINDOWS[0]
                while len(packed) < len(asked):
                    window = min(next(windows, window), call.link.welcome.max_keys)
                    piece = asked[len(packed) : len(packed) + window]
                    request = LookupRequest(call.root, self._pool, b"".join(piece))
                    tiers = call.ask(request, Tiers).tiers[: len(piece)]
                    packed += tiers
                    over = time.monotonic() > deadline_s  # every answer came in time, and yet it takes too long
                    if over or len(tiers) < len(piece) or (whole and Tier.NONE in tiers):
                        break
        except KVStoreError:
            self._caller.counters.add("lookups_failed")
        if bad and not whole:
            packed = chosen.spread(packed)
        absent = [at for at in (packed.find(Tier.NONE), packed.find(Tier.PENDING)) if at >= 0]
        return Lookup(min(absent, default=len(packed)), bytes(packed))

    def batch_exists(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are present."""
        return self.lookup(keys).run

    def lease(self, keys: Sequence[bytes], *, layerwise: bool = False) -> LeaseView:
        """Pin chunks in DRAM and read them in place; starts reading those that are on SSD, see `LeaseView.wait`.

        layerwise: the first parts of every chunk are read first. Keys above the daemon's limit are MISS_FULL.
        """
        view = grant_lease(self._caller, self._call, self.layout, self._pool, keys, layerwise)
        self._caller.counters.add_codes("load", view.packed, LOADS)
        return view

    def pin(self, keys: Sequence[bytes], ttl_s: float = 60.0) -> PinHandle:
        """Keep chunks that are in DRAM there, for at most `ttl_s`."""
        return grant_pin(self._caller, self._call, self._pool, keys, ttl_s)

    def reserve(
        self, keys: Sequence[bytes], parents: Sequence[bytes] | None = None, *, shard: int = 0
    ) -> ReservationView:
        """Get writable slots, to be filled in place and committed. Keys above the daemon's limit are REFUSED_FULL.

        Parents as for `batch_set`. The caller's duties are in `ReservationView`.
        """
        view = grant_reservation(self._caller, self._call, self.layout, self._pool, keys, parents, shard)
        self._caller.counters.add_codes("reserve", view.packed, ACKS)
        return view

    def _shape(self, shard: int) -> Shape | None:
        return self._shapes[shard] if 0 <= shard < len(self._shapes) else None

    @contextmanager
    def _call(self, size_bytes: int = 0) -> Iterator[Call]:
        """A connection on which this root is open, for a call that copies so much. Raises KVStoreError."""
        caller = self._caller
        answer_until_s, fills_until_s = caller.until(), caller.until(size_bytes)
        copies_until_s = caller.until(COPY_PATIENCE * size_bytes)
        with caller.connection(answer_until_s) as (link, connection):
            handle = self._handle
            if handle is None or handle[0] is not link:
                opened = self._open_on(connection, answer_until_s)
                if opened.digest != self.digest:
                    raise Unavailable("the daemon understands this namespace differently: its version is another one")
                handle = self._handle = link, opened.root
            try:
                yield Call(link, connection, handle[1], caller.deadline_s, fills_until_s, copies_until_s)
            except (Invalid, Closed):
                self._handle = None  # the daemon may have forgotten the handle (purge): open it again next time
                raise

    def _open_on(self, connection: Connection, deadline_s: float) -> RootOpened:
        """Raises KVStoreError. A refusal is said once: every later call would be REFUSED_INVALID without a reason."""
        try:
            return connection.call(self._open, RootOpened, deadline_s)
        except Invalid as error:
            self._caller.watcher.last_error = str(error)
            if not self._told:
                self._told = True
                _LOG.warning("the daemon refuses this namespace: %s", error)
            raise

    def _in_pieces(
        self, codes: bytearray, size_bytes: int, do: Callable[[Call, slice, bytearray], bool], arena_bytes: int
    ) -> KVStoreError | None:
        """Do a batch in sub-batches, as large as daemon and arena take them, until one returns False.

        size_bytes: what is copied for a key. arena_bytes: what the arena must have for each key (0: no matter).
        Fills `codes` as far as it comes; returns the error that ended it.
        """
        if not codes:
            return None
        try:
            with self._call(len(codes) * size_bytes) as call:
                welcome = call.link.welcome
                step = welcome.max_keys
                if arena_bytes:
                    step = max(1, min(step, welcome.arena_bytes // arena_bytes))
                try:
                    for start in range(0, len(codes), step):
                        piece = slice(start, min(start + step, len(codes)))
                        part = bytearray(piece.stop - start)
                        try:
                            go_on = do(call, piece, part)
                        finally:
                            codes[piece] = part
                        if not go_on:
                            break
                finally:
                    if call.late:
                        self._caller.watcher.suspect()
                    for reservation in call.held:
                        call.connection.post(Abort(reservation))
        except KVStoreError as error:
            return error
        return None

    def _loaded(self, codes: bytearray, otherwise: Load) -> list[Load]:
        settle(codes, otherwise)
        self._caller.counters.add_codes("load", codes, LOADS)
        return loads(codes)

    def _stored(self, codes: bytearray, otherwise: Ack) -> list[Ack]:
        settle(codes, otherwise)
        self._caller.counters.add_codes("store", codes, ACKS)
        return acks(codes)
