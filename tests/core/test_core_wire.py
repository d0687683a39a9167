"""The wire decoder: byte by byte equals at once, and whatever comes in is a message or Invalid, in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, get_type_hints

import msgspec
import pytest
from core_strategies import FAST, identities, json_values, namespaces, texts
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.errors import Invalid
from kvstore.namespace import BaseNamespace, RequestIdentity
from kvstore.wire import messages as wire
from kvstore.wire.frame import HEAD_BYTES, FrameReader, decode_body, decode_head, encode
from kvstore.wire.messages import BY_KIND, MAX_FRAME_BYTES, MAX_KEYS, Lookup, Message, StatsAnswer

HEAD = struct.Struct("<IBBHI")
KINDS = sorted(BY_KIND)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    bytes: st.binary(max_size=64),
    str: texts,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    BaseNamespace: namespaces,
    RequestIdentity: identities,
    dict[str, Any]: st.dictionaries(texts, json_values, max_size=3),
    dict[str, str | int | float | bool | None]: st.dictionaries(
        texts,
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts,
        max_size=3,
    ),
}


def message_of(kind: int) -> st.SearchStrategy[Message]:
    cls = BY_KIND[kind]
    hints = get_type_hints(cls)
    return st.builds(cls, **{name: BY_TYPE[hints[name]] for name in cls.__struct_fields__})


any_message = st.sampled_from(KINDS).flatmap(message_of)
requests = st.integers(0, 2**32 - 1)
frames = st.lists(st.tuples(requests, any_message), min_size=1, max_size=4)


def frame(kind: int, body: bytes, request: int = 1) -> bytes:
    return HEAD.pack(len(body), kind, 0, 0, request) + body


def feed_in(reader: FrameReader, stream: bytes, cuts: list[int]) -> list[tuple[int, Message]]:
    got: list[tuple[int, Message]] = []
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    for start, end in pairwise(edges):
        got += reader.feed(stream[start:end])
    return got


@given(frames, st.lists(st.integers(0, 2000), max_size=5))
@FAST
def test_byte_by_byte_equals_any_cuts_equals_at_once(sent: list[tuple[int, Message]], cuts: list[int]) -> None:
    stream = b"".join(encode(message, request) for request, message in sent)
    assert list(FrameReader().feed(stream)) == sent
    assert list(FrameReader().feed(memoryview(stream))) == sent
    assert feed_in(FrameReader(), stream, cuts) == sent
    assert feed_in(FrameReader(), stream, list(range(len(stream)))) == sent


@given(frames, st.integers(1, 10_000))
@FAST
def test_a_truncated_stream_gives_its_whole_frames_and_waits(sent: list[tuple[int, Message]], missing: int) -> None:
    parts = [encode(message, request) for request, message in sent]
    stream = b"".join(parts)
    cut = stream[: max(0, len(stream) - missing)]
    whole, end = 0, 0
    for part in parts:
        end += len(part)
        whole += end <= len(cut)
    reader = FrameReader()
    assert list(reader.feed(cut)) == sent[:whole]
    assert list(reader.feed(stream[len(cut) :])) == sent[whole:]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_the_wire(kind: int) -> None:
    @given(message_of(kind), requests)
    @settings(FAST, max_examples=15)
    def round_trip(message: Message, request: int) -> None:
        data = encode(message, request)
        assert decode_head(data[:HEAD_BYTES]) == (len(data) - HEAD_BYTES, kind, request)
        assert decode_body(kind, data[HEAD_BYTES:]) == message

    round_trip()


@pytest.mark.parametrize("kind", KINDS)
def test_any_body_is_that_message_or_invalid(kind: int) -> None:
    @given(st.binary(max_size=80), message_of(kind), st.data())
    @settings(FAST, max_examples=80)
    def fuzz(garbage: bytes, message: Message, data: st.DataObject) -> None:
        body = bytearray(encode(message, 1)[HEAD_BYTES:])
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        for bad in (garbage, bytes(body), bytes(body[:-1]), bytes(body) + b"\x00"):
            outcome(kind, bad)

    fuzz()


def outcome(kind: int, body: bytes) -> Message | None:
    """The message, or None where it was Invalid; anything else fails the test."""
    try:
        message = decode_body(kind, body)
    except Invalid:
        return None
    assert type(message) is BY_KIND[kind]
    return message


@given(st.binary(max_size=200))
@example(bytes(12))
@example(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
@example(b"\xff" * 40)
@FAST
def test_garbage_on_the_socket_is_invalid_or_waits(garbage: bytes) -> None:
    reader = FrameReader()
    try:
        for _, message in reader.feed(garbage):
            assert isinstance(message, Message)
    except Invalid:
        pass


def test_an_oversized_frame_is_refused_by_its_head_alone() -> None:
    head = HEAD.pack(MAX_FRAME_BYTES + 1, Lookup.KIND, 0, 0, 1)
    reader = FrameReader()
    assert list(reader.feed(head[:-1])) == []
    with pytest.raises(Invalid, match="frame of 1048577 bytes is above the limit of 1048576"):
        list(reader.feed(head[-1:]))
    with pytest.raises(Invalid, match="above the limit of 64"):
        list(FrameReader(64).feed(HEAD.pack(65, Lookup.KIND, 0, 0, 1)))


@pytest.mark.parametrize(
    "head", [HEAD.pack(0, 0, 0, 0, 1), HEAD.pack(0, 255, 0, 0, 1), HEAD.pack(0, 22, 1, 0, 1), HEAD.pack(0, 22, 0, 1, 1)]
)
def test_unknown_kinds_and_reserved_bits_are_invalid(head: bytes) -> None:
    with pytest.raises(Invalid, match="unknown kind"):
        list(FrameReader().feed(head))


def test_the_largest_requests_fit_a_frame_and_larger_ones_are_refused_where_they_are_made() -> None:
    keys = bytes(32 * MAX_KEYS)
    for message in (wire.Reserve(1, 0, 0, keys, keys), wire.Leased(1, bytes(MAX_KEYS), bytes(8 * MAX_KEYS), keys)):
        assert list(FrameReader().feed(encode(message, 1))) == [(1, message)]
    with pytest.raises(Invalid, match="Lookup takes 1048593 bytes"):
        encode(Lookup(1, 1, bytes(MAX_FRAME_BYTES + 9)), 1)


S = StatsAnswer.KIND
NESTED = b"\x91\x81\xa1a"
"""A StatsAnswer up to its first value."""


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (S, NESTED + b"\xd4\x05x"),
        (S, NESTED + b"\xd7\xff" + bytes(8)),
        (S, NESTED + b"\x91\xd6\xff" + bytes(4)),
        (S, NESTED + b"\xc7\x0c\xff" + bytes(12)),
        (S, NESTED + b"\xc4\x01z"),
        (S, NESTED + b"\x81\x01\x02"),
        (S, NESTED + b"\x81\x90\x02"),
        (S, NESTED + b"\x81\x81\x01\x02\x03"),
        (S, NESTED + b"\xc1"),
        (S, NESTED + b"\xa2\xff\xfe"),
        (S, b"\x91\x81\xa2\xff\xfe\x01"),
        (S, b"\x91\xc0"),
        (S, NESTED + b"\x91" * 100_000 + b"\x01"),
        (S, NESTED + b"\x81\xa1a" * 100_000 + b"\x01"),
        (Lookup.KIND, b"\x94\x01\x01\xc4\x00" + b"\x91" * 500_000),
        (Lookup.KIND, b"\x93\x01\x01\xa1x"),
        (Lookup.KIND, b"\x93\x01\xcb" + bytes(8) + b"\xc4\x00"),
        (Lookup.KIND, b"\x93\x01\xc3\xc4\x00"),
        (Lookup.KIND, b"\x92\x01\x01"),
        (Lookup.KIND, b"\x83\xa4root\x01\xa4pool\x01\xa4keys\xc4\x00"),
        (Lookup.KIND, b""),
        (wire.AdminCall.KIND, b"\x92\xa1a\x81\xa1a\xd7\xff" + bytes(8)),
        (wire.AdminCall.KIND, b"\x92\xa1a\x81\xa1a\x90"),
    ],
)
def test_hostile_bodies_are_invalid(kind: int, body: bytes) -> None:
    """Extension types, timestamps, odd keys, deep nesting, wrong types.

    Regression: the values typed Any took timestamps, extensions, byte strings and keys of any type.
    """
    assert outcome(kind, body) is None
    with pytest.raises(Invalid):
        list(FrameReader().feed(frame(kind, body)))


def test_deep_json_that_the_decoder_takes_is_taken() -> None:
    body = NESTED + b"\x91" * 300 + b"\x01"
    assert isinstance(outcome(S, body), StatsAnswer)


def test_claimed_lengths_allocate_nothing() -> None:
    """Arrays, maps, texts and bytes of four gigabytes, in frames of a few bytes."""
    bodies = [NESTED + claim for claim in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff")]
    bodies += [
        b"\xdd\xff\xff\xff\xff",
        b"\x91\xdf\xff\xff\xff\xff",
        NESTED + b"\xc6\xff\xff\xff\xff",
        NESTED + b"\xc9\xff\xff\xff\xff\x05",
    ]

    def decode_all() -> None:
        for kind in KINDS:
            for body in bodies:
                outcome(kind, body)

    assert peak_bytes(decode_all) < 1 << 20


def test_a_reader_holds_a_frame_and_what_it_was_fed_and_no_more() -> None:
    reader = FrameReader()
    stream = encode(Lookup(1, 1, bytes(MAX_FRAME_BYTES - 100)), 1) * 3
    pieces = [stream[start : start + 65536] for start in range(0, len(stream), 65536)]

    def feed() -> Iterator[int]:
        for piece in pieces:
            for _ in reader.feed(piece):
                yield 1

    assert peak_bytes(lambda: sum(feed())) < 6 * MAX_FRAME_BYTES
    # what is left between frames
    assert len(reader._buffer) == 0


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_whoever_stops_in_the_middle_sees_each_frame_once() -> None:
    """A client that leaves the loop at its answer got the frames before it a second time with the next read."""
    reader = FrameReader()
    stream = b"".join(encode(wire.Done(), number) for number in range(5))
    for request, _ in reader.feed(stream):
        if request == 2:
            break
    assert [request for request, _ in reader.feed(b"")] == [3, 4]
    assert list(reader.feed(b"")) == []


def test_older_peers_send_fewer_fields_and_newer_ones_more() -> None:
    short = decode_body(wire.Hello.KIND, msgspec.msgpack.encode([1, 1, b"s"]))
    assert short == wire.Hello(1, 1, b"s", "", True, False)
    long = decode_body(wire.Release.KIND, msgspec.msgpack.encode([5, 6, 0.5, "a field of the future"]))
    assert long == wire.Release(5, 6, 0.5)


def test_unknown_fields_of_an_identity_are_refused_not_ignored() -> None:
    namespace = msgspec.to_builtins(BaseNamespace("m", "w", ()))
    namespace["new_field"] = "x"
    assert outcome(wire.OpenRoot.KIND, msgspec.msgpack.encode([namespace, {}])) is None
    assert outcome(wire.OpenRoot.KIND, msgspec.msgpack.encode([namespace | {"extra": {"new_field": "x"}}, {}])) is None
    del namespace["new_field"]
    assert outcome(wire.OpenRoot.KIND, msgspec.msgpack.encode([namespace, {}])) is not None


def test_every_message_is_registered_once() -> None:
    assert len(BY_KIND) == len(Message.__subclasses__())
    assert all(0 < kind < 256 for kind in BY_KIND)
    one_way = {cls.__name__ for cls in BY_KIND.values() if cls.ONE_WAY}
    assert one_way == {"Release", "Abort"}
