"""The planner: events in, answers and instructions out. It decides everything and does no I/O.

state.py    what is where, and the moves that keep it consistent
space.py    room in a tier: free slot, eviction, take-over of a segment
loads.py    look-up, lease, fill, release
stores.py   reserve, commit, abort
write_behind.py  what goes to SSD, and what its end means
removal.py  rm and purge
recovery.py what a volume brings back at start
A key's way: reserve -> (engine copies) -> commit -> write-behind -> evicted from DRAM -> lease -> fill -> copied.
"""

from kvstore.planner.budget import WriteBudget
from kvstore.planner.jobs import Delete, Read, Work, Write
from kvstore.planner.planner import Planner
from kvstore.planner.records import Limits, Session

__all__ = ["Delete", "Limits", "Planner", "Read", "Session", "Work", "Write", "WriteBudget"]
