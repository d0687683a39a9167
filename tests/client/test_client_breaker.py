"""The breaker as a pure state machine, with time by hand."""

from __future__ import annotations

import pytest

from kvstore.client.breaker import MAX_HOLD_S, MIN_HOLD_S, Breaker, State


def probe_now(breaker: Breaker, now_s: float) -> None:
    assert breaker.probe_in_s(now_s) == 0.0
    breaker.probe_sent()


def test_first_missed_deadline_opens_and_only_an_answered_probe_closes() -> None:
    breaker = Breaker()
    assert breaker.closed
    assert breaker.probe_in_s(0.0) is None
    assert breaker.fail(10.0)
    assert (breaker.state, breaker.closed) == (State.OPEN, False)
    assert not breaker.succeed(10.0), "an answer that nobody asked for as a probe proves nothing"
    assert breaker.probe_in_s(10.0) == pytest.approx(MIN_HOLD_S)
    probe_now(breaker, 10.0 + 2 * MIN_HOLD_S)
    assert (breaker.state, breaker.closed) == (State.HALF_OPEN, False)
    assert breaker.probe_in_s(11.0) is None, "one probe at a time"
    assert breaker.succeed(99.0)
    assert (breaker.state, breaker.closed) == (State.CLOSED, True)


def test_further_misses_while_open_change_nothing() -> None:
    breaker = Breaker()
    breaker.fail(0.0)
    assert not breaker.fail(0.01)
    assert breaker.probe_in_s(0.01) == pytest.approx(MIN_HOLD_S - 0.01)
    assert breaker.opened_total == 1


def test_holds_double_up_to_a_limit_while_it_flaps_and_start_again_after_peace() -> None:
    breaker, now_s, holds_s = Breaker(), 0.0, []
    for _ in range(12):
        breaker.fail(now_s)
        hold_s = breaker.probe_in_s(now_s)
        assert hold_s is not None
        holds_s.append(hold_s)
        now_s += hold_s + 1e-6
        probe_now(breaker, now_s)
        breaker.succeed(now_s)
    assert holds_s[:4] == pytest.approx([MIN_HOLD_S, 2 * MIN_HOLD_S, 4 * MIN_HOLD_S, 8 * MIN_HOLD_S])
    assert holds_s[-1] == pytest.approx(MAX_HOLD_S)
    now_s += 1000.0
    breaker.fail(now_s)
    assert breaker.probe_in_s(now_s) == pytest.approx(MIN_HOLD_S)


def test_another_daemon_starts_with_a_clean_slate() -> None:
    breaker = Breaker()
    breaker.fail(0.0)
    breaker.reset()
    assert breaker.closed
    breaker.fail(0.001)
    assert breaker.probe_in_s(0.001) == pytest.approx(MIN_HOLD_S)
