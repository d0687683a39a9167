"""Garbage on the data socket: a clear answer where one can be sent, the connection ends, nobody else notices."""

from __future__ import annotations

import os
import random
import resource
import struct

import msgspec
import pytest
from server_raw_client import NAMESPACE, RawClient
from server_rig import Rig, eventually

from kvstore.namespace import RequestIdentity
from kvstore.wire import messages as m
from kvstore.wire.frame import encode

HEAD = struct.Struct("<IBBHI")
HELLO = m.Hello(1, 1, b"s" * 16, "fuzz", want_fds=False)
RSS_SLACK_BYTES = 8 << 20
FUZZ_ROUNDS = 5000


def rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def refused(client: RawClient, sent: bytes, code: str, words: str) -> None:
    """Sending `sent` brings one Failed with `code` and `words`, then the end."""
    client.socket.sendall(sent)
    _, answer = client.receive()
    assert isinstance(answer, m.Failed)
    assert answer.code == code
    assert words in answer.message
    assert client.closed()


def frame(kind: int, body: bytes, request: int = 7) -> bytes:
    return HEAD.pack(len(body), kind, 0, 0, request) + body


BAD_AFTER_HELLO = {
    "unknown kind": (frame(99, b""), "unknown kind 99"),
    "reserved byte set": (HEAD.pack(0, m.Ping.KIND, 1, 0, 1), "unknown kind"),
    "over the limit": (HEAD.pack(m.MAX_FRAME_BYTES + 1, m.Lookup.KIND, 0, 0, 1), "above the limit"),
    "absurd length": (HEAD.pack(0xFFFFFFFF, m.Lookup.KIND, 0, 0, 1), "above the limit"),
    "not MessagePack": (frame(m.Lookup.KIND, b"\xc1\xc1\xc1"), "malformed Lookup"),
    "too few fields": (frame(m.Lookup.KIND, msgspec.msgpack.encode([1])), "malformed Lookup"),
    "wrong type": (frame(m.Lookup.KIND, msgspec.msgpack.encode([1, 0, 5])), "malformed Lookup"),
    "extension type": (frame(m.Lookup.KIND, b"\x93\x01\x00\xc7\x04\x2aevil"), "malformed Lookup"),
    "deep nesting": (frame(m.OpenRoot.KIND, b"\x91" * 100_000), "malformed OpenRoot"),
    "an answer as request": (encode(m.Tiers(b""), 1), "Tiers is not a request"),
    "a second Hello": (encode(HELLO, 1), "Hello is not a request"),
}


@pytest.mark.parametrize("case", BAD_AFTER_HELLO)
def test_a_bad_frame_ends_its_connection_and_no_other(rig: Rig, case: str) -> None:
    sent, words = BAD_AFTER_HELLO[case]
    with rig.client() as bad, rig.client() as good:
        refused(bad, sent, "invalid", words)
        assert good.ask(m.Ping()) == m.Done()
    assert rig.count("internal_errors_total") == 0
    assert rig.count("connections_refused_total", "invalid") == 1


def test_before_hello_even_a_large_frame_is_refused(rig: Rig) -> None:
    """A peer that nobody knows yet cannot make the daemon hold a MiB of half a frame."""
    with rig.connect() as client:
        refused(client, HEAD.pack(4097, m.Hello.KIND, 0, 0, 1), "invalid", "above the limit of 4096")


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: kvstore\r\n\r\n", b"\0" * 64, os.urandom(4096)])
def test_garbage_instead_of_hello(rig: Rig, sent: bytes) -> None:
    with rig.connect() as client:
        client.socket.sendall(sent)
        assert isinstance(client.receive()[1], m.Failed)
        assert client.closed()


def test_a_truncated_frame_waits_for_its_rest_and_holds_up_nobody(rig: Rig) -> None:
    sent = encode(m.Lookup(1, 0, os.urandom(32 * 4096)), 5)
    with rig.client() as half, rig.client() as other:
        half.socket.sendall(sent[: len(sent) // 2])
        assert other.ask(m.Ping()) == m.Done()
        half.socket.sendall(sent[len(sent) // 2 :])
        request, _answer = half.receive()
        assert request == 5
        half.socket.sendall(sent[:100])
    eventually(lambda: rig.status()["connections"] == 0)


def test_byte_by_byte_gives_the_same_answers(rig: Rig) -> None:
    keys = os.urandom(32 * 3)
    requests: list[m.Message] = [HELLO, m.OpenRoot(NAMESPACE, RequestIdentity()), m.Ping(), m.Lookup(1, 0, keys)]
    stream = b"".join(encode(message, number) for number, message in enumerate(requests))
    answers = []
    for step in (len(stream), 1):
        with rig.connect() as client:
            for start in range(0, len(stream), step):
                client.socket.sendall(stream[start : start + step])
            answers.append([client.receive() for _ in requests])
    assert answers[0] == answers[1]
    assert [type(answer) for _, answer in answers[0]][:3] == [m.Welcome, m.RootOpened, m.Done]


def test_fuzz_leaves_memory_descriptors_and_others_alone(rig: Rig) -> None:
    """Valid streams with bytes flipped, cut, doubled and inserted, at random places, with a seed that is printed."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    keys = dice.randbytes(32 * 64)
    valid = [
        encode(HELLO, 1),
        encode(m.OpenRoot(NAMESPACE, RequestIdentity(salt="x")), 2),
        encode(m.Lookup(1, 0, keys), 3),
        encode(m.Lease(1, 0, keys), 4),
        encode(m.Reserve(1, 0, 0, keys[:64], bytes(64)), 5),
        encode(m.Commit(1, 0, 2), 6),
        encode(m.Release(1, 10, 0.5), 7),
        encode(m.Pin(1, 0, keys, 1.0), 8),
        encode(m.AdminCall("rm", {"key": "x"}), 9),
        encode(m.Stats(), 10),
    ]
    with rig.client() as bystander:
        before = 0
        for number in range(FUZZ_ROUNDS):
            if number == FUZZ_ROUNDS // 5:  # by then allocators and caches are warm
                before = rss_bytes()
            stream = bytearray(b"".join(valid[:1] + dice.choices(valid, k=3)))
            for _ in range(dice.randrange(4)):
                place = dice.randrange(len(stream))
                match dice.randrange(4):
                    case 0:
                        stream[place] ^= 1 << dice.randrange(8)
                    case 1:
                        del stream[place : place + dice.randrange(1, 40)]
                    case 2:
                        stream[place:place] = dice.randbytes(dice.randrange(1, 40))
                    case _:
                        stream[place:place] = stream[place : place + 200]
            with rig.connect() as client:
                try:
                    client.socket.sendall(stream)
                except (BrokenPipeError, ConnectionResetError):  # it has heard enough
                    continue
        eventually(lambda: rig.status()["connections"] == 1)
        assert rss_bytes() - before < RSS_SLACK_BYTES
        assert bystander.ask(m.Ping()) == m.Done()
    assert rig.count("internal_errors_total") == 0
    assert rig.count("connections_refused_total", "invalid") > FUZZ_ROUNDS / 10
