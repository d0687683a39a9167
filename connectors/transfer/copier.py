"""The interface of copiers, and the order of bytes that all of them share.

A shard of a chunk is `layers` parts, one after another; a part is the chunk's blocks of that layer, one after another;
a block is its page in the order in which it lies in the engine's memory. So the blocks at the end of a chunk can be
loaded alone, and a layer can be loaded as soon as its part is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Copier(Protocol):
    """One rank's cache of one group. Methods are called on transfer threads, several at a time, and block.

    Blocks of one call are distinct. The caller holds the blocks, and keeps the memory of `shard` mapped, until the
    return: then no byte is read or written any more, by the host or a device, also where the call raises.
    """

    @property
    def layers(self) -> int: ...

    @property
    def page_bytes(self) -> int:
        """Of one block of one layer."""
        ...

    def mark(self) -> object:
        """Called on the engine's thread when a job is handed over: its copies come after all the engine did until now.

        On a device this records an event of the compute stream; on the host everything has happened already.
        """
        ...

    def gather(self, mark: object, blocks: Sequence[int], shard: memoryview) -> None:
        """Engine to slot: fill `shard` (writable, exactly layers x len(blocks) pages).

        Raises ValueError where a block or the shard's size is out of range; nothing was copied then.
        """
        ...

    def scatter(self, mark: object, shard: memoryview, first: int, chunk_blocks: int, blocks: Sequence[int]) -> None:
        """Slot to engine: fill `blocks` with blocks first, first + 1, ... of a chunk of `chunk_blocks` blocks.

        `shard` has exactly layers x chunk_blocks pages. Raises as `gather`.
        """
        ...

    def close(self) -> None:
        """Let go of the engine's memory. Idempotent; no call is under way."""
        ...
