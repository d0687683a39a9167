"""Roots and series: the name spaces that keys live in. A series is one pool of one root: one dict from key to row."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.layout import Rule, SlotLayout


@dataclass(slots=True, eq=False)
class Series:
    """Chunks of one pool under one root; all of one slot size."""

    number: int
    root: bytes
    pool: int
    slot_bytes: int
    layout: SlotLayout | None = None
    """None for chunks found on SSD whose root no engine has opened since: nothing can ask for them yet."""
    rule: Rule = "all"
    rows: dict[bytes, int] = field(default_factory=dict)
    pending: dict[bytes, int] = field(default_factory=dict)
    """Keys reserved and not yet committed, with the number of their reservations."""
    waiting: dict[bytes, set[int]] = field(default_factory=dict)
    """Missing parent -> orphans that hang on it: linked again when the parent is stored."""
    orphans: dict[int, bytes] = field(default_factory=dict)
    """Orphan -> its missing parent: the inverse of `waiting`."""


@dataclass(slots=True, eq=False)
class Root:
    """One identity. `description` is JSON for people, kept so that `ls` can name it after a restart."""

    digest: bytes
    handle: int
    description: bytes = b"{}"
    series: dict[int, Series] = field(default_factory=dict)
    """By pool number."""
    epoch_sequence: int = 0
    """Raised by a purge: reservations made before it are refused at commit."""
