"""The arena: shared host memory that daemon and engines map, and the control page that says what is readable in it."""

from kvstore.arena.control import FAILED
from kvstore.arena.mapping import ArenaMapping
from kvstore.arena.memory import Arena

__all__ = ["FAILED", "Arena", "ArenaMapping"]
