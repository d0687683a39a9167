"""What the manager takes from the configuration; `change` applies those that a reload may change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    lease_ttl_s: float = 30.0
    write_bytes_per_s: int = 0
    """0: no limit."""
    write_bytes_per_day: int = 0
    io_threads: int = 16
    free_space_floor_bytes: int = 0
    """Free bytes of the file system below which a volume takes no new segment."""
    policy: str = "lru"
