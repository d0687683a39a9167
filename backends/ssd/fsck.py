"""Offline check of a volume: every record is read and verified, and the index compared with what is really there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.backends.ssd.catalog import Catalog
from kvstore.backends.ssd.columns import Columns
from kvstore.backends.ssd.files import lock_folder, typed
from kvstore.backends.ssd.formats import unpack_superblock
from kvstore.backends.ssd.io import Scratch, read_all, write_all
from kvstore.backends.ssd.opening import INDEX, SEGMENTS, SUPERBLOCK, TOMBSTONES
from kvstore.backends.ssd.reader import verify
from kvstore.backends.ssd.recovery import rebuild
from kvstore.backends.ssd.segments import SEGMENT_HEADER_BYTES, Segment, SegmentFiles
from kvstore.backends.ssd.tombstones import Tombstones
from kvstore.errors import Corrupt, Invalid
from kvstore.record import DEAD, HEADER_BYTES, Header, unpack
from kvstore.units import PAGE_BYTES

_THREADS = 4
_ANY_SIZE_BYTES = 1 << 55
"""fsck does not know the volume's cap and must not cut segments off."""

Progress = Callable[[int, int], None]


class _Suspect(Corrupt):
    """No record of this place: whether one was ever written there, the index knows."""


@dataclass(slots=True)
class Report:
    """What was found. `clean` = nothing that a repair would change."""

    records: int = 0
    """Record headers found, good or bad."""
    ok: int = 0
    """Verified to the last byte and alive."""
    corrupt: int = 0
    """Damaged header or payload, or a record at another place than its own, where the index names a record."""
    leftovers: int = 0
    """Slots that no record was written to since their segment took another slot size: parts of older ones, harmless."""
    dropped: int = 0
    """Intact, but purged or removed (by tombstone)."""
    orphan_slots: int = 0
    """Good records that the index does not name, e.g. older copies: harmless, a rebuild looks at them."""
    stale_index: int = 0
    """Index rows whose record is not there any more: harmless, found out at read."""
    unreadable: int = 0
    """Segments that the device failed to read."""
    index_lost: bool = False
    repaired: bool = False
    corrupt_places: list[int] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)
    """Places that only the index can tell apart, see `corrupt` and `leftovers`."""
    notes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.corrupt or self.unreadable or self.index_lost or self.notes)


@dataclass(slots=True)
class _Scan:
    """One segment's part of the report."""

    good: list[tuple[int, int]] = field(default_factory=list)
    """(place, sequence) of each live record."""
    corrupt: list[int] = field(default_factory=list)
    """Records of this very place that do not match their checksums."""
    suspect: list[int] = field(default_factory=list)
    """Bytes that are no record of this place: damage where the index names one, else leftovers."""
    dropped: int = 0
    unreadable: bool = False


def check(path: Path, repair: bool = False, progress: Progress = lambda done, total: None) -> Report:
    """Read and verify every record; with `repair` wipe the headers of corrupt ones and rebuild the index.

    progress: called with (bytes done, bytes in all). Nothing is written without `repair`.
    Raises Unavailable (in use, not readable), Invalid (no volume there, other format version), Corrupt (superblock).
    """
    if not (path / SUPERBLOCK).is_file():
        raise Invalid(f"{path} holds no SSD volume")
    with ExitStack() as stack:
        lock_fd = lock_folder(path)
        stack.callback(os.close, lock_fd)
        try:
            block = unpack_superblock((path / SUPERBLOCK).read_bytes(), str(path / SUPERBLOCK))
            files = SegmentFiles(path / SEGMENTS, block.volume_id, block.unit_bytes, _ANY_SIZE_BYTES, direct=False)
            stack.callback(files.close)
            files.discover()
            stones = Tombstones(path / TOMBSTONES)
            stack.callback(stones.close)
            report = Report(notes=list(files.notes), unreadable=len(files.unreadable))
            good = _scan_all(files, stones, report, progress)
            catalog = _open_index(path / INDEX, block.volume_id, good, report)
            report.corrupt = len(report.corrupt_places)
            report.records = report.ok + report.corrupt + report.dropped
            if repair:
                _wipe(files, report.corrupt_places)
                catalog = catalog or Catalog(path / INDEX)
                _, catalog = rebuild(catalog, files, stones, block.volume_id, lambda places: _wipe(files, places))
                report.repaired = True
            if catalog is not None:
                catalog.close()
        except OSError as error:
            raise typed(error, f"cannot check the SSD volume {path}") from error
    return report


def _scan_all(files: SegmentFiles, stones: Tombstones, report: Report, progress: Progress) -> dict[int, int]:
    """Place -> sequence of all live, verified records."""
    good: dict[int, int] = {}
    segments = [segment for segment in files.all() if segment.stride_bytes]
    total = sum(segment.units for segment in segments) * files.unit_bytes
    done = 0
    scratch = Scratch()
    with ThreadPoolExecutor(_THREADS, "kvstore-fsck") as pool:
        scans = pool.map(lambda segment: _scan_segment(segment, files, stones, scratch), segments)
        for segment, scan in zip(segments, scans, strict=True):
            good.update(scan.good)
            report.corrupt_places += scan.corrupt
            report.suspects += scan.suspect
            report.ok += len(scan.good)
            report.dropped += scan.dropped
            report.unreadable += scan.unreadable
            done += segment.units * files.unit_bytes
            progress(done, total)
    report.records = report.ok + len(report.corrupt_places) + report.dropped
    return good


def _scan_segment(segment: Segment, files: SegmentFiles, stones: Tombstones, scratch: Scratch) -> _Scan:
    scan = _Scan()
    stride = segment.stride_bytes
    record = scratch.pages(stride // PAGE_BYTES)
    try:
        with files.use(segment) as fd:
            for slot in range(files.slots(segment)):
                offset = SEGMENT_HEADER_BYTES + slot * stride
                have = read_all(fd, [record], offset)
                if have < HEADER_BYTES:
                    break
                place = files.base(segment) + offset
                try:
                    header = _verified(record, have, place)
                except _Suspect:
                    scan.suspect.append(place)
                    continue
                except Corrupt:
                    scan.corrupt.append(place)
                    continue
                if header is None:
                    continue
                if stones.kills(header.root, header.pool, header.key, header.sequence):
                    scan.dropped += 1
                else:
                    scan.good.append((place, header.sequence))
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        scan.unreadable = True
    return scan


def _verified(record: memoryview, have: int, place: int) -> Header | None:
    """The header of a slot whose payload matches; None for an empty slot. Raises Corrupt, _Suspect."""
    try:
        header = unpack(record[:HEADER_BYTES])
    except Corrupt as error:
        raise _Suspect(str(error)) from error
    if header is None:
        return None
    if header.place != place or header.payload_bytes + HEADER_BYTES != len(record) or have < len(record):
        raise _Suspect(f"the record at place {place} belongs elsewhere or is cut short")
    verify(header, record[HEADER_BYTES:])
    return header


def _open_index(folder: Path, volume_id: bytes, good: dict[int, int], report: Report) -> Catalog | None:
    """Compare the index with the records; None where there is none to open."""
    if not folder.is_dir():
        report.index_lost = bool(report.records)
        return None
    try:
        catalog = Catalog(folder)
    except Corrupt:
        report.index_lost = True
        return None
    try:
        report.index_lost = bool(report.records) and not catalog.complete_for(volume_id)
        columns = Columns(catalog.estimated_rows())
        for rows in catalog.rows():
            columns.extend(rows)
    except Corrupt:
        report.index_lost = True
        return catalog
    named = set(columns["place"].tolist())
    if not report.index_lost:
        both = report.corrupt_places + report.suspects
        report.corrupt_places = sorted(place for place in both if place in named)
        report.leftovers = len(both) - len(report.corrupt_places)
    indexed = dict(zip(columns["place"].tolist(), columns["sequence"].tolist(), strict=True))
    report.stale_index = sum(good.get(place) != sequence for place, sequence in indexed.items())
    report.orphan_slots = sum(indexed.get(place) != sequence for place, sequence in good.items())
    return catalog


def _wipe(files: SegmentFiles, places: Sequence[int]) -> None:
    """Overwrite these headers: each is proven corrupt, or dead by tombstone."""
    touched: set[Segment] = set()
    for place in places:
        segment = files.at(place)
        if segment is not None:
            with files.use(segment) as fd:
                write_all(fd, [memoryview(DEAD)], place - files.base(segment))
            touched.add(segment)
    for segment in touched:
        files.sync(segment)
