"""The daemon's edge: two unix sockets (data, admin), connections, sessions. It decides nothing about chunks.

listener.py     Server: accepts, limits, drains         socket_file.py  claim a path, replace a stale file
protocol.py     frames in, answers out, fairness         connection.py   the verbs of the data socket
sessions.py     sessions, client processes, limbo        admin.py        the verbs of the admin socket
peer.py         who is at the other end                  hub.py          what all connections of a server share
"""

from kvstore.server.hub import Limits
from kvstore.server.listener import Server

__all__ = ["Limits", "Server"]
