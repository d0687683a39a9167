"""One engine process of the demonstration: replays its share of the trace through the real client, checks every byte.

For each request, as an inference engine would: look up the prompt's blocks, fetch the leading run that is there, verify
it against what the keys say, and store the rest, in place of computing it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from time import perf_counter

from bench.memory import Bytes, Rotation, copy_s, private_memory
from bench.trace import TOKENS_PER_BLOCK, Payload, Request
from kvstore.client import Client, Root
from kvstore.codes import Ack, Load
from kvstore.keys import NO_PARENT, chain_parents
from kvstore.layout import one_part_pool
from kvstore.namespace import BaseNamespace

DEADLINE_S = 5.0
"""Longer than an engine's: two engines, the daemon and the disk share what may be two cores, and no miss is wanted."""
RECONNECT_S = 60.0


@dataclass(slots=True)
class Tally:
    """What happened, in the end added up over all requests. Rates are kept as bytes and the seconds they took."""

    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    """Chunks served, by tier."""
    verified_chunks: int = 0
    wrong_bytes: int = 0
    stored: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """Chunks refused or missed after a look-up had seen them, by reason."""
    moves: Counter[str] = field(default_factory=Counter)
    moved_bytes: Counter[str] = field(default_factory=Counter)
    moved_s: Counter[str] = field(default_factory=Counter)
    kept: list[bytes] = field(default_factory=list)
    """Keys acknowledged or served."""

    def add(self, other: Tally) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            value += getattr(other, name)
            setattr(self, name, value)

    def moved(self, what: str, size_bytes: int, seconds: float) -> None:
        self.moves[what] += 1
        self.moved_bytes[what] += size_bytes
        self.moved_s[what] += seconds  # type: ignore[assignment]


def demo_namespace(chunk_bytes: int) -> BaseNamespace:
    pool = one_part_pool(chunk_bytes, tokens_per_chunk=TOKENS_PER_BLOCK)
    return BaseNamespace(
        model="mooncake-conversation-replay", weights="payload-is-a-function-of-the-key", pools=(pool,)
    )


def engine_main(
    socket_path: Path, requests: Sequence[Request], chunk_bytes: int, name: str, go: Event, out: Connection
) -> None:
    """Replay `requests`; sends one Tally for each, then None. `go` is cleared while the daemon is known to be down."""
    most = max(len(request.keys) for request in requests)
    buffers, other = (Rotation.over(private_memory(most * chunk_bytes), chunk_bytes).pieces for _ in range(2))
    payload = Payload(chunk_bytes)
    with Client(socket_path, label=name, deadline_s=DEADLINE_S) as client:
        client.wait_connected(RECONNECT_S)
        root = client.root(demo_namespace(chunk_bytes))
        for request in requests:
            tally = Tally()
            while not _serve(root, request, payload, buffers, other, tally):
                go.wait(RECONNECT_S)
                client.wait_connected(RECONNECT_S)
            out.send(tally)
    out.send(None)


def _serve(
    root: Root, request: Request, payload: Payload, buffers: Sequence[Bytes], other: Sequence[Bytes], tally: Tally
) -> bool:
    """One request into `tally`. False where the daemon did not answer: take the request again.

    `other` is memory for a plain copy of what was fetched, which the fetching is compared with.
    """
    seen = root.batch_exists(request.keys)
    hits = _load(root, request.keys[:seen], payload, buffers, tally) if seen else 0
    if hits is None or not _store(root, request.keys, hits, payload, buffers, tally):
        return False
    tally.requests = 1
    tally.tokens = request.input_tokens
    tally.hit_tokens = min(request.input_tokens, hits * TOKENS_PER_BLOCK)
    if hits:
        tally.moved("memcpy of the same chunks", hits * buffers[0].nbytes, copy_s(other[:hits], buffers[:hits]))
    return True


def _load(root: Root, keys: Sequence[bytes], payload: Payload, buffers: Sequence[Bytes], tally: Tally) -> int | None:
    """Fetch and verify; returns the length of the run that was served, None where the daemon did not answer."""
    out = buffers[: len(keys)]
    start_s = perf_counter()
    codes = root.batch_get(keys, out)
    taken_s = perf_counter() - start_s
    for key, code, buffer in zip(keys, codes, out, strict=True):
        if code.hit:
            tally.hits[code.name] += 1
            tally.verified_chunks += 1
            tally.wrong_bytes += payload.wrong_bytes(key, buffer)
            tally.kept.append(key)
        elif code != Load.MISS_UNAVAILABLE:
            tally.lost[code.name] += 1
    slowest = "get, some of it from SSD" if Load.SSD in codes else "get, all from DRAM"
    tally.moved(slowest, sum(code.hit for code in codes) * out[0].nbytes, taken_s)
    if Load.MISS_UNAVAILABLE in codes:
        return None
    return next((number for number, code in enumerate(codes) if not code.hit), len(codes))


def _store(
    root: Root, keys: Sequence[bytes], first: int, payload: Payload, buffers: Sequence[Bytes], tally: Tally
) -> bool:
    """Store keys[first:]; False where the daemon did not answer."""
    new, filled = keys[first:], buffers[first : len(keys)]
    for key, buffer in zip(new, filled, strict=True):
        payload.fill(key, buffer)
    if not new:
        return True
    start_s = perf_counter()
    acks = root.batch_set(new, chain_parents(new, keys[first - 1] if first else NO_PARENT), filled)
    taken_s = perf_counter() - start_s
    stored = [key for key, ack in zip(new, acks, strict=True) if ack.stored]
    tally.kept += stored
    tally.stored += sum(ack.stored and ack != Ack.EXISTS for ack in acks)
    tally.lost.update(ack.name for ack in acks if ack.refused and ack != Ack.REFUSED_UNAVAILABLE)
    tally.moved("set", len(stored) * filled[0].nbytes, taken_s)
    return Ack.REFUSED_UNAVAILABLE not in acks
