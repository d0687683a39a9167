"""What `put`, `get` and `rm` share: moving a file of any size in and out of chunks (how they are named: names.py)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from kvstore.cli.exit import Exit, Failure
from kvstore.cli.names import CHUNK_BYTES, HEAD_BYTES, NAMESPACE, ROOT, Head, all_keys, first_key, parents_of
from kvstore.client import Client
from kvstore.codes import Ack, Load

if TYPE_CHECKING:
    from kvstore.cli.options import Daemon
    from kvstore.client import Root

BATCH_CHUNKS = 16
DEADLINE_S = 10.0
"""Tools may wait where an engine may not."""
PRESSURE_S = 60.0
"""How long `put` waits for the SSD to take what is not written yet."""

_REFUSALS = {
    Ack.REFUSED_FULL: "there is no room: it is larger than the store, or all else is pinned or not yet written",
    Ack.REFUSED_BACKPRESSURE: "the SSD does not keep up with what is to be written; try again later",
    Ack.REFUSED_ORPHAN: "an earlier part was evicted while the rest was stored: it is larger than the store",
    Ack.REFUSED_QUOTA: "the quota is used up",
    Ack.REFUSED_CLOSED: "the daemon is stopping",
}


@contextmanager
def open_root(daemon: Daemon, label: str) -> Iterator[Root]:
    """The files' root on a fresh client. Raises Unreachable or Failure (denied) before anything is done."""
    daemon.connect_data().close()
    client = Client(daemon.socket_path, label=label, deadline_s=DEADLINE_S)
    try:
        if not client.wait_connected(DEADLINE_S):
            raise daemon.silent(client.last_error)
        yield client.root(NAMESPACE)
    finally:
        client.close()


def read_head(daemon: Daemon, root: Root, name: str) -> Head | None:
    """The head of the file stored under `name`, or None: never stored, gone, or proven damaged. Raises Failure."""
    chunk = memoryview(bytearray(CHUNK_BYTES))
    key = first_key(name)
    code = root.batch_get([key], [chunk])[0]
    if not code.hit:
        failure = _missed(daemon, name, key, code)
        if failure.code in (Exit.NOT_FOUND, Exit.CORRUPTION):
            return None
        raise failure
    return Head.decode(bytes(chunk[:HEAD_BYTES]))


def not_stored(daemon: Daemon, name: str) -> Failure:
    """Why `read_head` found nothing."""
    if _was_quarantined(daemon, first_key(name)):
        return _missed(daemon, name, first_key(name), Load.MISS_CORRUPT)
    return Failure(f"{name} is not stored", Exit.NOT_FOUND, "it was never put, or it was evicted or removed")


def digest_of(stream: BinaryIO) -> Head:
    """Read a seekable stream from where it stands to its end, and go back."""
    start = stream.tell()
    digest, length = hashlib.sha256(), 0
    while data := stream.read(CHUNK_BYTES):
        digest.update(data)
        length += len(data)
    stream.seek(start)
    return Head(length, digest.digest())


def store(root: Root, name: str, head: Head, stream: BinaryIO, durable: bool) -> Ack:
    """Store `stream`, whose content `head` describes. Returns the weakest answer of all chunks. Raises Failure."""
    keys = all_keys(name, head)
    parents = parents_of(keys)
    digest = hashlib.sha256()
    weakest = Ack.EXISTS
    for start in range(0, len(keys), BATCH_CHUNKS):
        end = min(start + BATCH_CHUNKS, len(keys))
        target = memoryview(bytearray((end - start) * CHUNK_BYTES))
        offset = 0
        if start == 0:
            target[:HEAD_BYTES] = head.encode()
            offset = HEAD_BYTES
        digest.update(target[offset : offset + _read_full(stream, target[offset:])])
        answers = _store_batch(root, name, keys[start:end], parents[start:end], _cut(target), durable)
        weakest = min(weakest, *answers)
    if digest.digest() != head.digest or stream.read(1):
        raise Failure(f"{name}: the file changed while it was read", hint=f"`kvstore rm {name}`, then put it again")
    if root.lookup(keys).run < len(keys):
        raise Failure(f"{name}: parts of it were evicted already", hint="it is larger than what the store may hold")
    return weakest


def fetch(daemon: Daemon, root: Root, name: str, head: Head, write: Callable[[memoryview], object]) -> None:
    """Hand the file's bytes to `write` in order; at the end they are checked against the digest. Raises Failure."""
    keys = all_keys(name, head)
    if (run := root.lookup(keys).run) < len(keys):
        raise Failure(f"{name}: part {run + 1} of {len(keys)} is gone (evicted)", Exit.NOT_FOUND, "store it again")
    digest = hashlib.sha256()
    left = head.length_bytes
    for start in range(0, len(keys), BATCH_CHUNKS):
        batch = keys[start : start + BATCH_CHUNKS]
        chunks = memoryview(bytearray(len(batch) * CHUNK_BYTES))
        for key, code in zip(batch, root.batch_get(batch, _cut(chunks)), strict=True):
            if not code.hit:
                raise _missed(daemon, name, key, code)
        data = chunks[HEAD_BYTES if start == 0 else 0 :][:left]
        digest.update(data)
        write(data)
        left -= len(data)
    if digest.digest() != head.digest:
        raise Failure(f"{name}: the bytes are not those that were stored", Exit.CORRUPTION, f"`kvstore rm {name}`")


def _cut(buffer: memoryview) -> list[memoryview]:
    return [buffer[i : i + CHUNK_BYTES] for i in range(0, len(buffer), CHUNK_BYTES)]


def _store_batch(
    root: Root, name: str, keys: list[bytes], parents: list[bytes], chunks: list[memoryview], durable: bool
) -> list[Ack]:
    """As batch_set; where the SSD is behind, it waits and goes on with the rest."""
    done: list[Ack] = []
    deadline_s = time.monotonic() + PRESSURE_S
    while len(done) < len(keys):
        first = len(done)
        answers = root.batch_set(keys[first:], parents[first:], chunks[first:], durable=durable)
        for answer in answers:
            if not answer.stored:
                break
            done.append(answer)
        else:
            continue
        if answer is not Ack.REFUSED_BACKPRESSURE or time.monotonic() > deadline_s:
            why = _REFUSALS.get(answer, answer.name.lower().replace("_", " "))
            code = Exit.UNREACHABLE if answer is Ack.REFUSED_UNAVAILABLE else Exit.ERROR
            raise Failure(f"{name} was not stored: {why}", code)
        time.sleep(0.05)
    return done


def _missed(daemon: Daemon, name: str, key: bytes, code: Load) -> Failure:
    """A client is only told that it is a miss; why is in the daemon's ledger, for those who may ask."""
    gone = code in (Load.MISS_UNKNOWN, Load.MISS_AFTER_GAP, Load.MISS_STALE, Load.MISS_IO)
    if code is Load.MISS_CORRUPT or (gone and _was_quarantined(daemon, key)):
        return Failure(
            f"{name}: its bytes on SSD are damaged; they were quarantined", Exit.CORRUPTION, "store it again"
        )
    if code in (Load.MISS_UNAVAILABLE, Load.MISS_DEADLINE):
        return Failure(f"{name}: the daemon did not answer in time", Exit.UNREACHABLE, "see `kvstore status`")
    if gone and code is not Load.MISS_IO:
        return Failure(f"{name}: a part was evicted while it was read", Exit.NOT_FOUND, "store it again")
    return Failure(f"{name} cannot be read now: {code.name.lower().replace('_', ' ')}")


def _was_quarantined(daemon: Daemon, key: bytes) -> bool:
    try:
        events = daemon.call("inspect", key=key.hex(), root=ROOT.hex())["events"]
    except Failure:
        return False
    return any(event["what"] == "quarantined" for event in events[-1:])


def _read_full(stream: BinaryIO, target: memoryview) -> int:
    """Fill `target` as far as the stream reaches."""
    done = 0
    while done < len(target):
        data = stream.read(min(len(target) - done, CHUNK_BYTES))
        if not data:
            break
        target[done : done + len(data)] = data
        done += len(data)
    return done
