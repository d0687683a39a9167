"""Answers and reasons: their classes, and the counters and events that carry them."""

from __future__ import annotations

import pytest

from kvstore.codes import Ack, Gone, Load, Tier
from kvstore.ledger import Event, Ledger


def test_what_counts_as_stored() -> None:
    assert {ack.name for ack in Ack if ack.stored} == {"STORED_DRAM", "STORED_WRITE_BEHIND", "STORED_SSD", "EXISTS"}
    assert {ack.name for ack in Ack if ack.refused} == {ack.name for ack in Ack if ack.name.startswith("REFUSED_")}
    assert not any(ack.stored and ack.refused for ack in Ack)


def test_what_counts_as_a_hit() -> None:
    assert {load.name for load in Load if load.hit} == {"DRAM", "SSD", "REMOTE"}
    assert all(load.hit != load.name.startswith("MISS_") for load in Load)


@pytest.mark.parametrize("codes", [Tier, Ack, Load, Gone])
def test_codes_fit_one_byte_and_have_one_name_each(codes: type[Tier]) -> None:
    assert all(0 <= code < 256 for code in codes)
    assert len(codes.__members__) == len(list(codes)), "an alias would hide a number that is used twice"


def test_counters_add_up_by_label() -> None:
    ledger = Ledger()
    ledger.count("evictions_total", "CAPACITY")
    ledger.count("evictions_total", "TAKEOVER", 2)
    ledger.count("requests_total")
    assert ledger.value("evictions_total") == 3
    assert ledger.value("evictions_total", "TAKEOVER") == 2
    assert ledger.value("evictions_total", "ORPHAN") == ledger.value("nothing") == 0
    assert ledger.snapshot() == {"evictions_total": {"CAPACITY": 1, "TAKEOVER": 2}, "requests_total": {"": 1}}


def test_the_ledger_keeps_the_last_events_only() -> None:
    ledger = Ledger(events=3)
    events = [Event(float(n), "evicted", "CAPACITY", "dram", b"r", b"%d" % (n % 2)) for n in range(5)]
    for event in events:
        ledger.record(event)
    assert ledger.events() == events[2:]
    assert ledger.events(b"1") == [events[3]]
