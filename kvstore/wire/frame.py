"""Frames: 12-byte head (body length u32, kind u8, reserved u8, reserved u16, request id u32, all LE), then the body.

A decoder fed byte by byte gives the same messages as one fed all at once; anything malformed raises Invalid and the
connection is over. Memory is bounded by MAX_FRAME_BYTES a connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NoReturn

import msgspec

from kvstore.errors import Invalid
from kvstore.wire.messages import BY_KIND, MAX_FRAME_BYTES, AdminAnswer, Message, StatsAnswer

_HEAD = struct.Struct("<IBBHI")
HEAD_BYTES = _HEAD.size
_ENCODER = msgspec.msgpack.Encoder()


def _no_extension(code: int, data: memoryview) -> NoReturn:
    raise Invalid(f"MessagePack extension type {code}: none is allowed")


_DECODERS = {kind: msgspec.msgpack.Decoder(cls, ext_hook=_no_extension) for kind, cls in BY_KIND.items()}
_FREE_FORM: dict[int, str] = {StatsAnswer.KIND: "stats", AdminAnswer.KIND: "result"}
"""Fields typed Any: what the decoder cannot hold to JSON values, we must."""


def encode(message: Message, request: int) -> bytes:
    """One frame. Raises Invalid where the peer would refuse it for its size."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise Invalid(f"{type(message).__name__} takes {len(body)} bytes, a frame holds {MAX_FRAME_BYTES}")
    return _HEAD.pack(len(body), message.KIND, 0, 0, request) + body


def decode_head(head: bytes | memoryview, max_bytes: int = MAX_FRAME_BYTES) -> tuple[int, int, int]:
    """(body length, kind, request id). Raises Invalid before a byte of the body is read."""
    size, kind, zero8, zero16, request = _HEAD.unpack(head)
    if size > max_bytes:
        raise Invalid(f"frame of {size} bytes is above the limit of {max_bytes}")
    if kind not in _DECODERS or zero8 or zero16:
        raise Invalid(f"frame of unknown kind {kind}: is this a kvstore client of a newer version?")
    return size, kind, request


def decode_body(kind: int, body: bytes | memoryview) -> Message:
    """Raises Invalid for everything that is not a message of this kind, and nothing else."""
    try:
        message = _DECODERS[kind].decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"malformed {BY_KIND[kind].__name__}: {error}") from error
    if kind in _FREE_FORM:
        _check_json(BY_KIND[kind].__name__, getattr(message, _FREE_FORM[kind]))
    return message


def _check_json(what: str, value: object) -> None:
    """Timestamps and byte strings decode into `Any`, and so do maps with keys of any kind: refuse them here."""
    open_values = [value]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            if not all(isinstance(name, str) for name in value):
                raise Invalid(f"malformed {what}: a map has a key that is no text")
            open_values += value.values()
        elif isinstance(value, list):
            open_values += value
        elif not isinstance(value, (str, int, float, bool, type(None))):
            raise Invalid(f"malformed {what}: {type(value).__name__} is no JSON value")


class FrameReader:
    """Incremental decoder. Not thread-safe."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self.max_bytes = max_bytes

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[int, Message]]:
        """Yield (request id, message) for each frame completed by `data`. Raises Invalid; the reader is then dead.

        Nothing is taken before the first step. A caller may stop early (close the generator, or drop it): the frames
        that it took are gone, the rest comes with the next feed. One generator at a time.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEAD_BYTES:
                size, kind, request = decode_head(bytes(buffer[start : start + HEAD_BYTES]), self.max_bytes)
                end = start + HEAD_BYTES + size
                if len(buffer) < end:
                    break
                body = bytes(buffer[start + HEAD_BYTES : end])
                start = end
                yield request, decode_body(kind, body)
        finally:
            del buffer[:start]
