"""Eviction policies: pure, small, one file each behind the interface in base.py."""

from kvstore.policy.base import EvictionPolicy, Rows
from kvstore.policy.lru import LeafLRU

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LeafLRU}
"""By the name that the setting `policy.name` takes."""

__all__ = ["POLICIES", "EvictionPolicy", "LeafLRU", "Rows"]
