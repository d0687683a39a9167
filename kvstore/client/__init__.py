"""The client: `Client(...).root(namespace)` has `batch_set` and `batch_get`; see root.py for all verbs.

It needs numpy at most, starts one background thread, and answers misses where others raise or hang.
"""

from kvstore.client.client import Client
from kvstore.client.lease import LeaseView, PinHandle
from kvstore.client.reservation import ReservationView
from kvstore.client.root import Lookup, Root
from kvstore.codes import Ack, Load, Tier

__all__ = ["Ack", "Client", "LeaseView", "Load", "Lookup", "PinHandle", "ReservationView", "Root", "Tier"]
