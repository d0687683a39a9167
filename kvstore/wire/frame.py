"""Frames: 12-byte head (body length u32, kind u8, reserved u8, reserved u16, request id u32, all LE), then the body.

A decoder fed byte by byte gives the same messages as one fed all at once; anything malformed raises Invalid and the
connection is over. Memory is bounded by MAX_FRAME_BYTES a connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from kvstore.errors import Invalid
from kvstore.wire.messages import BY_KIND, MAX_FRAME_BYTES, Message

_HEAD = struct.Struct("<IBBHI")
HEAD_BYTES = _HEAD.size
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = {kind: msgspec.msgpack.Decoder(cls, ext_hook=None) for kind, cls in BY_KIND.items()}


def encode(message: Message, request: int) -> bytes:
    body = _ENCODER.encode(message)
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
    try:
        return _DECODERS[kind].decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"malformed {BY_KIND[kind].__name__}: {error}") from error


class FrameReader:
    """Incremental decoder. Not thread-safe."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self.max_bytes = max_bytes

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[int, Message]]:
        """Yield (request id, message) for each frame completed by `data`. Raises Invalid; the reader is then dead."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= HEAD_BYTES:
            size, kind, request = decode_head(bytes(buffer[start : start + HEAD_BYTES]), self.max_bytes)
            end = start + HEAD_BYTES + size
            if len(buffer) < end:
                break
            body = bytes(buffer[start + HEAD_BYTES : end])
            start = end
            yield request, decode_body(kind, body)
        del buffer[:start]
