"""One answer a key, whatever the keys are: checks before sending, the way back from the answers, runs of commits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.outcomes import Selection, acks, loads, malformed, repeated, settle
from kvstore.client.storing import COMMIT_BYTES, MOST_COMMIT_BYTES, commit_runs
from kvstore.codes import Ack, Load

GOOD = bytes(32)
A, B = b"a" * 32, b"b" * 32


def test_malformed_keys_are_found_whatever_they_are() -> None:
    keys: list[object] = [GOOD, b"short", b"x" * 33, None, 7, "x" * 32, bytearray(32), [], A]
    assert malformed(keys) == {1, 2, 3, 4, 5, 6, 7}
    assert malformed([GOOD, A]) == set()
    assert malformed([]) == set()


def test_only_later_occurrences_are_repeated() -> None:
    assert repeated([A, B, A, GOOD, B, A]) == {2, 4, 5}
    assert repeated([A, [], A, None, None]) == {2}
    assert repeated([A, B]) == set()


@given(count=st.integers(0, 12), bad=st.sets(st.integers(0, 15)), width=st.sampled_from([1, 8]))
def test_answers_find_their_keys_again(count: int, bad: set[int], width: int) -> None:
    bad = {i for i in bad if i < count}
    chosen = Selection(count, bad)
    items = [bytes([i + 1]) * width for i in range(count)]
    sent = list(chosen.of(items))
    assert sent == [item for i, item in enumerate(items) if i not in bad]
    assert len(chosen) == len(sent)
    expected = b"".join(bytes(width) if i in bad else item for i, item in enumerate(items))
    assert chosen.spread(b"".join(sent), width) == expected


def test_settle_answers_only_what_has_no_answer() -> None:
    codes = bytearray([0, Load.DRAM, 0])
    settle(codes, Load.MISS_DEADLINE)
    assert loads(codes) == [Load.MISS_DEADLINE, Load.DRAM, Load.MISS_DEADLINE]


def test_codes_of_a_newer_daemon_count_as_not_reached() -> None:
    assert loads(b"\xf0") == [Load.MISS_UNAVAILABLE]
    assert acks(b"\xf0") == [Ack.REFUSED_UNAVAILABLE]


@given(
    codes=st.lists(st.sampled_from([Ack.GRANTED, Ack.EXISTS, Ack.REFUSED_FULL]), max_size=60),
    size=st.sampled_from([COMMIT_BYTES // 8, COMMIT_BYTES // 2, COMMIT_BYTES, 2 * COMMIT_BYTES]),
)
def test_commit_runs_hold_every_granted_key_once_and_end_with_a_small_one(codes: list[Ack], size: int) -> None:
    packed = bytes(codes)
    runs = list(commit_runs(packed, size))
    covered = [i for first, count in runs for i in range(first, first + count)]
    assert covered == sorted(set(covered))
    granted = [i for i, code in enumerate(codes) if code == Ack.GRANTED]
    assert set(granted) <= set(covered)
    limit = COMMIT_BYTES
    for first, count in runs:
        inside = packed[first : first + count].count(Ack.GRANTED)
        assert 1 <= inside <= max(1, limit // size)
        limit = min(2 * limit, MOST_COMMIT_BYTES)
    if granted:
        first, count = runs[-1]
        assert packed[first : first + count].count(Ack.GRANTED) == 1
