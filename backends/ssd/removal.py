"""Making records unfindable for good: tombstone first, then the header on disk, then the index."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.backend import Item
from kvstore.backends.ssd.formats import KIND_KEY, Tombstone
from kvstore.backends.ssd.io import Scratch, write_all
from kvstore.backends.ssd.reader import Reader
from kvstore.backends.ssd.segments import Segment, SegmentFiles
from kvstore.backends.ssd.tombstones import Tombstones
from kvstore.errors import Corrupt
from kvstore.record import DEAD


class Remover:
    """Thread-safe. Raises OSError, which the volume maps."""

    def __init__(self, files: SegmentFiles, reader: Reader, scratch: Scratch, stones: Tombstones) -> None:
        self._files = files
        self._reader = reader
        self._scratch = scratch
        self._stones = stones

    def remove(self, items: Sequence[Item]) -> None:
        """Durable on return; the index's rows are the caller's to drop."""
        self._stones.append([Tombstone(KIND_KEY, i.root, i.sequence, i.pool, i.key) for i in items])
        self.wipe([item.place for item in items])

    def wipe(self, places: Sequence[int]) -> None:
        """Overwrite, durably, the record headers at these places that are dead by tombstone or damaged."""
        touched: set[Segment] = set()
        for place in places:
            segment = self._files.at(place)
            if segment is None or not segment.stride_bytes or not self._is_dead(place, segment.stride_bytes):
                continue
            block = self._scratch.pages(1)
            block[:] = DEAD
            with self._files.use(segment) as fd:
                write_all(fd, [block], place - self._files.base(segment))
            touched.add(segment)
        for segment in touched:
            self._files.sync(segment)

    def _is_dead(self, place: int, stride_bytes: int) -> bool:
        try:
            header = self._reader.header_at(place, stride_bytes)
        except Corrupt:
            return True
        return header is not None and self._stones.kills(header.root, header.pool, header.key, header.sequence)
