"""What the scheduler tells the workers in a step: plain data that crosses process boundaries. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.connectors.vllm.plan import ChunkBlocks, Geometry
from kvstore.namespace import BaseNamespace, RequestIdentity


@dataclass(frozen=True, slots=True)
class Setting:
    """What all jobs of an engine have in common; with every piece of work, since workers may start at any time."""

    namespace: BaseNamespace
    geometry: Geometry
    layers: tuple[str, ...]
    page_bytes: int


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Chunks into blocks. The blocks are the job's until its request is reported.

    Without keys it fails: the engine waits for a report, also where no load could be planned.
    """

    request_id: str
    identity: RequestIdentity
    keys: tuple[bytes, ...]
    pieces: tuple[ChunkBlocks, ...]
    """One a key."""

    @property
    def blocks(self) -> set[int]:
        return {block for piece in self.pieces for block in piece.blocks}


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks into chunks. The blocks are held for the job until every rank has acknowledged its number."""

    number: int
    identity: RequestIdentity
    keys: tuple[bytes, ...]
    parents: tuple[bytes, ...]
    pieces: tuple[ChunkBlocks, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """Of one step."""

    setting: Setting | None = None
    """Set where there are jobs."""
    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    void_loads: bool = False
    """The weights may have changed: loads that were handed over before this step must fail."""
