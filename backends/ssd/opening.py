"""Opening a volume's folder: lock, superblock, direct I/O, segments, tombstones, index; each failure one sentence."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.backends.ssd.catalog import Catalog, move_aside
from kvstore.backends.ssd.files import lock_folder, probe_direct, replace_file, typed
from kvstore.backends.ssd.formats import Superblock, pack_superblock, unpack_superblock
from kvstore.backends.ssd.segments import SegmentFiles
from kvstore.backends.ssd.tombstones import Tombstones
from kvstore.errors import Corrupt, Invalid
from kvstore.slab import UNIT_BYTES
from kvstore.units import PAGE_BYTES, format_size

MOST_UNITS = 4096
"""Above this many, a new volume gets larger units: one file a segment, and each is looked at when the volume opens."""
SUPERBLOCK, SEGMENTS, INDEX, TOMBSTONES = "VOLUME", "segments", "index", "tombstones"


@dataclass(slots=True)
class Opened:
    """Everything a volume owns, ready."""

    path: Path
    size_bytes: int
    direct: bool
    superblock: Superblock
    lock_fd: int
    files: SegmentFiles
    stones: Tombstones
    catalog: Catalog
    notes: list[str] = field(default_factory=list)


def open_folder(path: Path, size_bytes: int, unit_bytes: int | None, direct: str) -> Opened:
    """Raises as `SSDVolume.open`; what was opened before a failure is closed again."""
    with ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o750)
        except OSError as error:
            raise typed(error, f"cannot create the SSD folder {path}") from error
        lock_fd = lock_folder(path)
        stack.callback(os.close, lock_fd)
        try:
            superblock = _superblock(path, size_bytes, unit_bytes)
            use_direct, why_not = probe_direct(path, direct)
            folder = path / SEGMENTS
            folder.mkdir(exist_ok=True, mode=0o750)
            files = SegmentFiles(folder, superblock.volume_id, superblock.unit_bytes, size_bytes, use_direct)
            stack.callback(files.close)
            files.discover()
            stones = Tombstones(path / TOMBSTONES)
            stack.callback(stones.close)
        except OSError as error:
            raise typed(error, f"cannot open the SSD volume {path}") from error
        notes = [why_not] if why_not else []
        notes += files.notes
        if stones.damaged:
            notes.append(
                f"{stones.damaged} damaged tombstones: records removed long ago may be back if the index is lost"
            )
        catalog = _catalog(path)
        stack.pop_all()
        return Opened(path, size_bytes, use_direct, superblock, lock_fd, files, stones, catalog, notes)


def _catalog(path: Path) -> Catalog:
    """Open the index; one that is proven damaged is moved aside, and `recover` fills a new one from the headers."""
    try:
        return Catalog(path / INDEX)
    except Corrupt:
        move_aside(path / INDEX)
        return Catalog(path / INDEX)


def _superblock(path: Path, size_bytes: int, unit_bytes: int | None) -> Superblock:
    file = path / SUPERBLOCK
    if file.exists():
        block = unpack_superblock(file.read_bytes(), str(file))
        if unit_bytes is not None and unit_bytes != block.unit_bytes:
            raise Invalid(f"{path} was made with units of {block.unit_bytes} bytes, not {unit_bytes}")
    else:
        if any((path / SEGMENTS).glob("*.kvs")):
            raise Corrupt(f"{file} is missing beside segment files; move the folder away to start an empty volume")
        block = Superblock(secrets.token_bytes(16), unit_bytes or _default_unit(size_bytes), 0)
        if block.unit_bytes % PAGE_BYTES:
            raise Invalid(f"a unit of {block.unit_bytes} bytes is no multiple of 4 KiB")
    if size_bytes < block.unit_bytes:
        raise Invalid(
            f"an SSD volume of {format_size(size_bytes)} is smaller than one unit of {format_size(block.unit_bytes)}"
        )
    if not file.exists():
        replace_file(file, pack_superblock(block))
    return block


def _default_unit(size_bytes: int) -> int:
    unit = UNIT_BYTES
    while size_bytes // unit > MOST_UNITS:
        unit *= 2
    return unit
