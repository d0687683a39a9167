"""The manager: lets the planner decide, acts on what it says, and answers the server. Decide synchronously, act later.

manager.py  the data verbs: decide, submit, answer
volumes.py  what volumes need besides reads and writes: recovery, growth, first writing, tombstones
views.py    what operators see: status, stat, ls, inspect
"""

from kvstore.manager.manager import Manager
from kvstore.manager.settings import ManagerSettings

__all__ = ["Manager", "ManagerSettings"]
