"""Recovery of a volume at start: from the index, or from the record headers where the index is lost or damaged.

Whatever the source, `columns.settle` decides what lives. Payloads are not read here: each read verifies its own.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvstore.backends.ssd.catalog import ROW_DTYPE, Catalog, Row, drop_aside, set_aside
from kvstore.backends.ssd.columns import Columns, Loaded, Settled, settle
from kvstore.backends.ssd.io import Scratch, read_all
from kvstore.backends.ssd.segments import SEGMENT_HEADER_BYTES, Segment, SegmentFiles
from kvstore.backends.ssd.tombstones import Tombstones
from kvstore.errors import Corrupt
from kvstore.record import HEADER_BYTES, MAGIC, Header, unpack
from kvstore.units import PAGE_BYTES, KiB, MiB

SEQUENTIAL_STRIDE_BYTES = 128 * KiB
"""Up to this stride a segment's headers are found faster by reading all of it than by one read a header."""
_CHUNK_BYTES = 8 * MiB
_THREADS = 8
"""Header reads in flight: one at a time would cost 80 us each."""
_PUT_ROWS = 4096

Wipe = Callable[[Sequence[int]], None]


def recover(
    catalog: Catalog,
    segments: SegmentFiles,
    stones: Tombstones,
    volume_id: bytes,
    wipe: Wipe,
) -> tuple[Loaded, Catalog]:
    """What survived, and the index to go on with (a new one where the old was lost).

    wipe: overwrites the record headers at these places that are dead by tombstone. Raises OSError, Unavailable, Full.
    """
    try:
        fresh = not any(segment.stride_bytes for segment in segments.all())
        if not catalog.complete_for(volume_id) and not fresh:
            raise Corrupt("the index is missing or incomplete")
        columns = Columns(catalog.estimated_rows() * 102 // 100 + 1024)
        for rows in catalog.rows():
            columns.extend(rows)
        numbers = catalog.load_roots()
        descriptions = catalog.descriptions()
        if fresh:
            catalog.mark_complete(volume_id)
        settled = settle(columns, numbers, segments, stones)
    except Corrupt:
        return rebuild(catalog, segments, stones, volume_id, wipe)
    _wipe_removed(settled, wipe)
    stones.compact()
    kept = set(settled.loaded.roots)
    unused = [root for root in {*numbers, *descriptions} if root not in kept]
    catalog.prune(settled.dead.tolist(), unused)
    settled.loaded.descriptions = {root: text for root, text in descriptions.items() if root in kept}
    return settled.loaded, catalog


def rebuild(
    catalog: Catalog, segments: SegmentFiles, stones: Tombstones, volume_id: bytes, wipe: Wipe
) -> tuple[Loaded, Catalog]:
    """A crash in here leaves an index without its mark, so that the next start rebuilds again."""
    columns, numbers, damaged = rebuild_rows(segments)
    settled = settle(columns, numbers, segments, stones)
    catalog = set_aside(catalog)
    loaded = settled.loaded
    loaded.rebuilt = True
    loaded.dropped += damaged
    for first in range(0, len(loaded), _PUT_ROWS):
        catalog.put(_rows(loaded, first, first + _PUT_ROWS), durable=False)
    catalog.mark_complete(volume_id)
    drop_aside(catalog.folder)
    _wipe_removed(settled, wipe)
    stones.compact()
    return loaded, catalog


def _rows(loaded: Loaded, first: int, end: int) -> list[Row]:
    return [
        Row(place, sequence, loaded.roots[number], pool, key.tobytes(), parent.tobytes())
        for place, sequence, number, pool, key, parent in zip(
            loaded.place[first:end].tolist(),
            loaded.sequence[first:end].tolist(),
            loaded.root_number[first:end].tolist(),
            loaded.pool[first:end].tolist(),
            loaded.keys[first:end],
            loaded.parents[first:end],
            strict=True,
        )
    ]


def _wipe_removed(settled: Settled, wipe: Wipe) -> None:
    if settled.removed:
        wipe(settled.removed)


def rebuild_rows(segments: SegmentFiles) -> tuple[Columns, dict[bytes, int], int]:
    """Read every record header of every segment: (rows, root -> number, damaged headers).

    A segment that the device cannot read is left out and never overwritten. Raises OSError for other failures
    (EMFILE...): nothing is rebuilt from half of the truth.
    """
    columns, damaged = Columns(1024), 0
    numbers: dict[bytes, int] = {}
    scratch = Scratch()

    def headers(segment: Segment) -> tuple[list[Header], int]:
        try:
            return _headers_of(segment, segments, scratch)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            segments.unreadable.add(segment.first_unit)
            return [], 0

    with ThreadPoolExecutor(_THREADS, "kvstore-rebuild") as pool:
        for found, bad in pool.map(headers, [s for s in segments.all() if s.stride_bytes]):
            damaged += bad
            rows = np.zeros(len(found), ROW_DTYPE)
            for row, header in zip(rows, found, strict=True):
                row["place"], row["sequence"], row["pool"] = header.place, header.sequence, header.pool
                row["root_number"] = numbers.setdefault(header.root, len(numbers))
                row["key"] = np.frombuffer(header.key, np.uint8)
                row["parent"] = np.frombuffer(header.parent, np.uint8)
            columns.extend(rows)
    return columns, numbers, damaged


def header_blocks(segment: Segment, files: SegmentFiles, scratch: Scratch, fd: int) -> Iterator[tuple[int, memoryview]]:
    """(place, 4 KiB block) of each slot of a segment, as far as the file goes. A block lives until the next one."""
    base, stride, slots = files.base(segment) + SEGMENT_HEADER_BYTES, segment.stride_bytes, files.slots(segment)
    if stride > SEQUENTIAL_STRIDE_BYTES:
        for slot in range(slots):
            block = scratch.pages(1)
            if read_all(fd, [block], SEGMENT_HEADER_BYTES + slot * stride) < HEADER_BYTES:
                return
            yield base + slot * stride, block
        return
    step = _CHUNK_BYTES // stride
    for first in range(0, slots, step):
        count = min(step, slots - first)
        chunk = scratch.pages(count * stride // PAGE_BYTES)
        have = read_all(fd, [chunk], SEGMENT_HEADER_BYTES + first * stride)
        for n in range(min(count, -(-(have - HEADER_BYTES + 1) // stride))):
            yield base + (first + n) * stride, chunk[n * stride : n * stride + HEADER_BYTES]


def _headers_of(segment: Segment, files: SegmentFiles, scratch: Scratch) -> tuple[list[Header], int]:
    found: list[Header] = []
    damaged = 0
    with files.use(segment) as fd:
        for place, block in header_blocks(segment, files, scratch, fd):
            if block[: len(MAGIC)] == bytes(len(MAGIC)):
                continue
            header = try_unpack(block)
            if header is None or header.place != place or header.payload_bytes + HEADER_BYTES != segment.stride_bytes:
                damaged += 1
            else:
                found.append(header)
    return found, damaged


def try_unpack(block: memoryview) -> Header | None:
    """None also for a damaged header."""
    try:
        return unpack(block)
    except Corrupt:
        return None
