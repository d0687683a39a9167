"""The control wire: frames (frame.py) that carry typed messages (messages.py). Pure: no sockets here."""
