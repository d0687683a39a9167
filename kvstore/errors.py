"""The few kinds of failure, each telling the caller what to do. A miss is a value, never an error.

OS, RocksDB and network errors are mapped to these once, at the backend's seam; the wire carries `code`.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of all errors that cross a seam of this project."""

    code = "error"


class Unavailable(KVStoreError):
    """The daemon, tier or device does not answer: use another tier or recompute, try again later."""

    code = "unavailable"


class InUse(Unavailable):
    """Another process has it, and two would destroy it: stop one of them, or configure another place."""


class Throttled(KVStoreError):
    """A bound was reached (queue, budget, connections): nothing is broken, come back later."""

    code = "throttled"


class Full(KVStoreError):
    """There is no space and nothing may be evicted: drop the data."""

    code = "full"


class Corrupt(KVStoreError):
    """Bytes were read that are proven not to be those stored: quarantine them, the chunk is a miss."""

    code = "corrupt"


class Invalid(KVStoreError):
    """The caller asked for something that can never work: fix the caller. The text says what."""

    code = "invalid"


class Denied(KVStoreError):
    """The caller is not allowed to do this (peer credentials, admin verb on the data socket)."""

    code = "denied"


class Closed(KVStoreError):
    """The object or daemon is shutting down: stop using it."""

    code = "closed"


BY_CODE: dict[str, type[KVStoreError]] = {
    cls.code: cls for cls in (KVStoreError, Unavailable, Throttled, Full, Corrupt, Invalid, Denied, Closed)
}


def from_code(code: str, message: str) -> KVStoreError:
    """Rebuild a typed error from its wire form; an unknown code becomes the base class."""
    return BY_CODE.get(code, KVStoreError)(message)
