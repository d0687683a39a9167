"""The index: which chunks exist and where. Columns by row, and one dict a series from key to row."""

from kvstore.index.columns import (
    BUSY_FILL,
    BUSY_WRITE,
    DEAD,
    NOWHERE,
    ORPHAN,
    READY,
    SICK,
    Columns,
    place_of,
    ssd_location,
    volume_of,
)
from kvstore.index.series import Root, Series

__all__ = [
    "BUSY_FILL",
    "BUSY_WRITE",
    "DEAD",
    "NOWHERE",
    "ORPHAN",
    "READY",
    "SICK",
    "Columns",
    "Root",
    "Series",
    "place_of",
    "ssd_location",
    "volume_of",
]
