"""The SSD write budget: a rate with a burst, a day, and changes while running."""

from __future__ import annotations

from kvstore.planner import WriteBudget
from kvstore.planner.budget import BURST_S, DAY_S


def taken(budget: WriteBudget, now_s: float, size_bytes: int = 100) -> int:
    """How many writes of this size are allowed at that moment (1000 at most)."""
    count = 0
    while count < 1000 and budget.take(size_bytes, now_s):
        count += 1
    return count


def test_zero_means_no_limit() -> None:
    assert taken(WriteBudget(), 5.0) == 1000


def test_a_burst_then_the_rate() -> None:
    budget = WriteBudget(bytes_per_s=100)
    assert taken(budget, 50.0) == BURST_S
    assert taken(budget, 50.5) == 0
    assert taken(budget, 53.0) == 3
    assert taken(budget, 1e6) == BURST_S, "what was not used does not pile up"


def test_a_chunk_larger_than_the_burst_is_written_in_the_end() -> None:
    budget = WriteBudget(bytes_per_s=10)
    size = 10 * int(BURST_S) * 3
    assert not budget.take(size, 0.0)
    assert not budget.take(size, 10.0)
    assert budget.take(size, 20.0)
    assert not budget.take(size, 49.0)
    assert budget.take(size, 50.0)


def test_a_day_is_counted_from_its_first_write() -> None:
    budget = WriteBudget(bytes_per_day=250)
    assert taken(budget, 1000.0) == 2
    assert budget.day_bytes == 200
    assert taken(budget, 1000.0 + DAY_S - 1) == 0
    assert taken(budget, 1000.0 + DAY_S) == 2
    assert budget.day_bytes == 200


def test_what_the_day_forbids_does_not_use_up_the_rate() -> None:
    budget = WriteBudget(bytes_per_s=100, bytes_per_day=100)
    assert taken(budget, 0.0) == 1
    budget.change(100, 0)
    assert taken(budget, 0.0) == BURST_S - 1


def test_new_limits_hold_at_once_and_the_day_goes_on() -> None:
    budget = WriteBudget()
    assert taken(budget, 0.0) == 1000
    budget.change(0, 100_100)
    assert taken(budget, 1.0) == 1, "what was written before the change counts"
    budget.change(100, 0)
    assert taken(budget, 2.0) == 0
    assert taken(budget, 4.0) == 2
    budget.change(0, 0)
    assert taken(budget, 5.0) == 1000
