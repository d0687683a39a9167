"""SSD tier: preallocated, recycled slots in segment files, written straight from the arena (O_DIRECT), every read
verified, an index that can be rebuilt from the slots. Not covered: which slot, when, and who is evicted (planner)."""

from kvstore.backends.ssd.columns import Loaded
from kvstore.backends.ssd.volume import SSDVolume

__all__ = ["Loaded", "SSDVolume"]
