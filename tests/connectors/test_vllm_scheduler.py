"""The scheduler's half against a real daemon and a stand-in for vLLM's requests and pool: what is asked and loaded, and
above all what must never be saved. The real engine drives it in tests/vllm."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.connectors.vllm.identity import CacheShape, chunk_pool, request_identity
from kvstore.connectors.vllm.options import Options
from kvstore.connectors.vllm.plan import Geometry
from kvstore.connectors.vllm.scheduler import Scheduler
from kvstore.connectors.vllm.work import Setting, Work
from kvstore.namespace import BaseNamespace
from kvstore.testing.daemon import DaemonProcess

BLOCK = 16
GEOMETRY = Geometry(BLOCK, 2)
CHUNK = GEOMETRY.chunk_tokens
SHAPE = CacheShape(("layer",), 4096, BLOCK, 1, "float32", "LBHNC", 1, 1, 1)
SETTING = Setting(BaseNamespace("m", "w", (chunk_pool(SHAPE, GEOMETRY),)), GEOMETRY, SHAPE.layers, SHAPE.page_bytes)


class Request:
    """What the connector reads of vLLM's Request."""

    prompt_embeds = mm_features = lora_request = None
    resumable = skip_reading_prefix_cache = False

    def __init__(self, name: str, tokens: int, seed: int = 0, **fields: Any) -> None:
        self.request_id = name
        self.num_tokens = tokens
        self.num_computed_tokens = self.num_in_flight_tokens = self.num_preemptions = 0
        self.block_hashes = [hashlib.sha256(bytes([seed, i])).digest() for i in range(tokens // BLOCK)]
        self.cache_salt: str | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.table = list(range(1, -(-tokens // BLOCK) + 1))
        self.__dict__.update(fields)


class Pool:
    """What the connector uses of vLLM's BlockPool."""

    def __init__(self, blocks: int = 200) -> None:
        self.num_gpu_blocks = blocks
        self.blocks = list(range(blocks))
        self.held = [0] * blocks

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.held[block] += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            self.held[block] -= 1
            assert self.held[block] >= 0


class Rig:
    def __init__(self, daemon: DaemonProcess, ranks: int = 1, **options: Any) -> None:
        self.daemon = daemon
        self.client = Client(daemon.socket_path, deadline_s=0.3)
        assert self.client.wait_connected(10)
        self.scheduler = Scheduler(self.client, Options(**options), lambda: SETTING, ranks)
        self.pool = Pool()
        self.scheduler.bind_pool(self.pool)
        self.requests: dict[str, Request] = {}

    def new(self, *arguments: Any, **fields: Any) -> Request:
        request = Request(*arguments, **fields)
        self.requests[request.request_id] = request
        self.scheduler.on_new_request(request)
        return request

    def store(self, request: Request, chunks: int) -> None:
        root = self.client.root(SETTING.namespace, request_identity(request.cache_salt, ""))
        keys = request.block_hashes[1 : 2 * chunks : 2]
        assert all(ack.stored for ack in root.batch_set(keys, None, [bytes(root.layout.shard_bytes[0])] * chunks))

    def matched(self, request: Request, local: int = 0) -> int:
        """Asked step by step, until there is an answer."""
        deadline_s = time.monotonic() + 5
        while (answer := self.scheduler.matched(request, local)) is None:
            assert time.monotonic() < deadline_s
            self.work()
        return answer

    def load(self, request: Request, local: int = 0) -> int:
        tokens = self.matched(request, local)
        self.scheduler.allocated(request, request.table, tokens)
        request.num_computed_tokens = local + tokens
        return tokens

    def work(self, *scheduled: Request, preempted: tuple[Request, ...] = ()) -> Work:
        return self.scheduler.work(
            [request.request_id for request in scheduled],
            lambda name: self.requests[name].table,
            [request.request_id for request in preempted],
        )

    def step(self, request: Request, tokens: int) -> Work:
        """A step that computes so many tokens, planned, run and processed."""
        work = self.work(request)
        request.num_computed_tokens += tokens
        return work

    def processed(self, loaded: set[str] = frozenset(), bad: set[int] = frozenset(), work: Work | None = None) -> None:
        self.scheduler.processed(loaded, bad, {job.number: 1 for job in work.saves} if work else {}, True)

    def held(self) -> list[int]:
        return [block for block, count in enumerate(self.pool.held) if count]


@pytest.fixture
def rig(daemon: DaemonProcess) -> Iterator[Rig]:
    rig = Rig(daemon)
    yield rig
    rig.scheduler.close()
    assert rig.scheduler.guard.total == 0


def saved_chunks(work: Work) -> list[int]:
    return [piece.chunk for job in work.saves for piece in job.pieces]


def test_saving_follows_what_has_been_processed(rig: Rig) -> None:
    request = rig.new("r", 4 * CHUNK + 5)
    assert rig.matched(request) == 0
    assert saved_chunks(rig.step(request, 2 * CHUNK)) == []
    work = rig.step(request, CHUNK + 3)
    assert saved_chunks(work) == [0, 1]
    assert rig.held() == [1, 2, 3, 4]
    assert rig.scheduler.busy
    rig.processed(work=work)
    assert rig.held() == []
    assert saved_chunks(rig.step(request, CHUNK + 2)) == [2]
    rig.scheduler.ended(request, request.table)
    last = rig.work()
    assert saved_chunks(last) == [3]
    assert last.saves[0].parents == (request.block_hashes[5],)
    assert last.saves[0].keys == (request.block_hashes[7],)


def test_two_ranks_must_both_have_copied(daemon: DaemonProcess) -> None:
    rig = Rig(daemon, ranks=2)
    request = rig.new("r", CHUNK)
    rig.step(request, CHUNK)
    work = rig.step(request, 1)
    rig.processed(work=work)
    assert rig.held() == [1, 2]
    rig.processed(work=work)
    assert rig.held() == []
    rig.processed(work=work)
    rig.scheduler.close()


def test_an_aborted_load_is_no_computed_token(rig: Rig) -> None:
    """The engine counts the tokens of a load as computed from the moment it has given the blocks."""
    request = rig.new("r", 3 * CHUNK)
    rig.store(request, 3)
    assert rig.load(request) == 3 * CHUNK
    assert rig.work().loads[0].blocks == {1, 2, 3, 4, 5, 6}
    rig.scheduler.ended(request, request.table)
    assert saved_chunks(rig.work()) == []
    rig.processed({"r"})


def test_another_connectors_load_is_not_ours_to_save(rig: Rig) -> None:
    """As a child of MultiConnector we hear of it as an allocation of no tokens, then see the count go up."""
    waiting = rig.new("waiting", 3 * CHUNK)
    assert rig.matched(waiting) == 0
    rig.scheduler.allocated(waiting, waiting.table, 0)
    waiting.num_computed_tokens = 2 * CHUNK
    rig.scheduler.ended(waiting, waiting.table)
    assert saved_chunks(rig.work()) == []


def test_a_load_that_fails_in_a_step_not_yet_processed(rig: Rig) -> None:
    """With asynchronous scheduling the next step is planned before a synchronous load (another connector's) has failed.

    Its tokens count as computed, are not in flight, and hold garbage, until the failure is processed.
    """
    request = rig.new("r", 3 * CHUNK)
    request.num_computed_tokens = 2 * CHUNK  # promised by the other connector
    rig.work(request)
    request.num_computed_tokens, request.num_in_flight_tokens = 2 * CHUNK + 4, 4
    assert saved_chunks(rig.work(request)) == [], "saved before the load's result was known"
    request.num_computed_tokens, request.num_in_flight_tokens = 0, 0  # it failed
    assert saved_chunks(rig.work(request)) == []
    request.num_computed_tokens = 2 * CHUNK + 4
    assert saved_chunks(rig.work(request)) == [0, 1]


def test_a_failed_load_is_not_asked_for_again(rig: Rig) -> None:
    request = rig.new("r", 3 * CHUNK)
    rig.store(request, 2)
    assert rig.load(request) == 2 * CHUNK
    assert rig.scheduler.matched(request, 0) == 0, "asked while it loads"
    rig.work()
    rig.processed({"r"}, {3})
    assert rig.matched(request) == 0
    request.num_preemptions = 1
    assert rig.matched(request) == 0


def test_a_good_load_is_not_saved_again_and_may_be_repeated_after_a_preemption(rig: Rig) -> None:
    request = rig.new("r", 4 * CHUNK)
    rig.store(request, 2)
    rig.load(request)
    rig.work()
    rig.processed({"r"})
    rig.step(request, CHUNK)
    assert saved_chunks(rig.work(request)) == [2]
    assert rig.scheduler.matched(request, 0) == 0
    request.num_preemptions, request.num_computed_tokens = 1, 0
    rig.work(preempted=(request,))
    assert rig.load(request) == 2 * CHUNK
    rig.scheduler.ended(request, request.table)
    assert saved_chunks(rig.work()) == []


def test_what_the_engine_has_is_not_loaded(rig: Rig) -> None:
    request = rig.new("r", 4 * CHUNK)
    rig.store(request, 4)
    assert rig.load(request, CHUNK + BLOCK) == 4 * CHUNK - CHUNK - BLOCK
    job = rig.work().loads[0]
    assert job.keys == tuple(request.block_hashes[3::2])
    assert [(piece.chunk, piece.first, piece.blocks) for piece in job.pieces] == [
        (1, 1, (4,)),
        (2, 0, (5, 6)),
        (3, 0, (7, 8)),
    ]
    assert rig.matched(rig.new("s", 4 * CHUNK), 4 * CHUNK) == 0


def test_saves_wait_for_room_and_drop_at_the_end(daemon: DaemonProcess) -> None:
    rig = Rig(daemon, held_share=0.02)  # 4 of 200 blocks
    request = rig.new("r", 6 * CHUNK)
    rig.step(request, 5 * CHUNK)
    first = rig.step(request, 1)
    assert saved_chunks(first) == [0, 1]
    assert saved_chunks(rig.step(request, 1)) == []
    rig.processed(work=first)
    assert saved_chunks(rig.step(request, 1)) == [2, 3]
    rig.scheduler.ended(request, request.table)
    assert rig.scheduler.counts["saves_dropped"] == 1
    rig.scheduler.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": {"kvstore": {"off": True}}},
        {"kv_transfer_params": {"kvstore": {"nonsense": 1}}},
        {"prompt_embeds": object()},
        {"mm_features": [object()]},
        {"lora_request": object()},
        {"resumable": True},
    ],
)
def test_requests_that_are_not_served(rig: Rig, fields: dict[str, Any]) -> None:
    request = rig.new("r", 2 * CHUNK, **fields)
    rig.store(request, 2)
    assert rig.scheduler.matched(request, 0) == 0
    rig.step(request, 2 * CHUNK)
    assert saved_chunks(rig.step(request, 1)) == []
    rig.scheduler.ended(request, request.table)
    assert saved_chunks(rig.work()) == []


def test_who_must_not_read_may_still_store(rig: Rig) -> None:
    request = rig.new("r", 2 * CHUNK, skip_reading_prefix_cache=True)
    rig.store(request, 1)
    assert rig.scheduler.matched(request, 0) == 0
    rig.step(request, 2 * CHUNK)
    assert saved_chunks(rig.step(request, 1)) == [0, 1]


def test_a_frozen_daemon_costs_a_step_two_milliseconds_and_a_request_a_miss(rig: Rig) -> None:
    request = rig.new("r", 2 * CHUNK)
    rig.store(request, 2)
    os.kill(rig.daemon.pid, signal.SIGSTOP)
    try:
        waits_s, started_s = [], time.monotonic()
        while True:
            before_s = time.monotonic()
            answer = rig.scheduler.matched(request, 0)
            waits_s.append(time.monotonic() - before_s)
            if answer is not None:
                break
            rig.work()
        assert answer == 0
        assert 0.015 < time.monotonic() - started_s < 0.3
        assert sorted(waits_s)[len(waits_s) // 2] < 0.002  # the median: a busy machine delays some
        assert rig.scheduler.counts["lookups_too_slow"] == 1
    finally:
        os.kill(rig.daemon.pid, signal.SIGCONT)


def test_leases_end_with_their_requests(rig: Rig) -> None:
    """A session may hold half of the arena: leases of requests that were never loaded would fill it."""
    for number in range(20):
        request = rig.new(f"r{number}", 2 * CHUNK)
        rig.store(request, 2)
        assert rig.matched(request) == 2 * CHUNK
        if number % 2:
            rig.scheduler.allocated(request, request.table, 0)
        rig.scheduler.ended(request, request.table)
    deadline_s = time.monotonic() + 5
    while (leases := _leases(rig.daemon)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert leases == 0


def test_a_new_epoch_keeps_the_old_requests_out(rig: Rig) -> None:
    old = rig.new("old", 2 * CHUNK)
    rig.store(old, 2)
    assert rig.matched(old) == 2 * CHUNK
    rig.scheduler.reset()
    assert rig.scheduler.matched(old, 0) == 0
    assert rig.step(old, 2 * CHUNK).void_loads
    assert saved_chunks(rig.step(old, 1)) == []
    new = rig.new("new", 2 * CHUNK)
    assert rig.matched(new) == 0, "another epoch's KV"
    rig.step(new, 2 * CHUNK)
    job = rig.step(new, 1).saves[0]
    assert job.identity.epoch


def _leases(daemon: DaemonProcess) -> int:
    command = [str(Path(sys.executable).with_name("kvstore")), "status", "--json", "--socket", str(daemon.socket_path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return sum(session["leases"] for session in json.loads(answer.stdout)["sessions"])
