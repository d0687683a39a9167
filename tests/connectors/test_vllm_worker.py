"""A worker against a real daemon, without vLLM: what is saved comes back byte for byte, what fails is named, and every
job is reported exactly once, whatever happens to it."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.connectors.transfer import HostCopier, layer_pages
from kvstore.connectors.vllm.identity import CacheShape, chunk_pool
from kvstore.connectors.vllm.plan import ChunkBlocks, Geometry
from kvstore.connectors.vllm.work import LoadJob, SaveJob, Setting, Work
from kvstore.connectors.vllm.worker import Worker
from kvstore.keys import chain_parents
from kvstore.namespace import BaseNamespace, RequestIdentity
from kvstore.testing.daemon import DaemonProcess

BLOCKS, BLOCKS_PER_CHUNK, PAGE = 24, 3, 2 * 16 * 8 * 4
GEOMETRY = Geometry(16, BLOCKS_PER_CHUNK)
NAMES = ("layer.0", "layer.1")


def setting(shards: int = 1) -> Setting:
    shape = CacheShape(NAMES, PAGE, 16, 1, "float32", "LBHNC", 2, shards, 1)
    pool = chunk_pool(shape, GEOMETRY)
    return Setting(BaseNamespace(model="m", weights="w", pools=(pool,)), GEOMETRY, NAMES, PAGE)


class Rank:
    """A worker with a cache of its own."""

    def __init__(self, daemon: DaemonProcess, rank: int = 0, replicas: int = 1) -> None:
        self.cache = np.random.default_rng(rank).random((2, BLOCKS, 2, 16, 8), np.float32)
        client = Client(daemon.socket_path, session=bytes(16), deadline_s=0.3)
        assert client.wait_connected(10)
        self.worker = Worker(client, rank, replicas)
        pages = [
            layer_pages(view.ctypes.data, 4, view.shape, [s // 4 for s in view.strides], BLOCKS) for view in self.cache
        ]
        self.worker.register(NAMES, HostCopier(pages, self.cache))

    def block(self, number: int) -> bytes:
        return self.cache[:, number].tobytes()

    def saved(self, count: int = 1) -> list[int]:
        return self._wait(self.worker.take_saved, count)

    def loaded(self, count: int = 1) -> list[str]:
        return self._wait(self.worker.take_loaded, count)

    def _wait(self, take: Callable[[], object], count: int) -> list:
        deadline_s, found = time.monotonic() + 10, []
        while len(found) < count:
            assert time.monotonic() < deadline_s, "a job was not reported"
            found += take()
            time.sleep(0.001)
        return found


@pytest.fixture
def rank(daemon: DaemonProcess) -> Iterator[Rank]:
    rank = Rank(daemon)
    yield rank
    rank.worker.close()


def keys(count: int, seed: int = 0) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(bytes([seed, i])).digest() for i in range(count))


def pieces(blocks: list[int], first: int = 0) -> tuple[ChunkBlocks, ...]:
    """Whole chunks, but for the first `first` blocks of the first."""
    padded = [-1] * first + blocks
    cut = [padded[at : at + BLOCKS_PER_CHUNK] for at in range(0, len(padded), BLOCKS_PER_CHUNK)]
    return tuple(
        ChunkBlocks(i, first if i == 0 else 0, tuple(block for block in part if block >= 0))
        for i, part in enumerate(cut)
    )


def save_job(number: int, chunks: tuple[bytes, ...], blocks: list[int]) -> SaveJob:
    return SaveJob(number, RequestIdentity(), chunks, tuple(chain_parents(chunks)), pieces(blocks))


def load_job(name: str, chunks: tuple[bytes, ...], blocks: list[int], first: int = 0) -> LoadJob:
    return LoadJob(name, RequestIdentity(), chunks, pieces(blocks, first))


def test_what_is_saved_comes_back_in_other_blocks(rank: Rank) -> None:
    chunks, source, target = keys(3), [9, 2, 3, 4, 5, 6, 12, 11, 10], [1, 13, 14, 15, 16, 17, 20, 19]
    expected = [rank.block(block) for block in source]
    untouched = [rank.block(block) for block in (0, 7, 8, 18, 21, 22, 23)]
    rank.worker.submit(Work(setting(), saves=(save_job(5, chunks, source),)))
    assert rank.saved() == [5]
    rank.worker.submit(Work(setting(), loads=(load_job("r", chunks, target, 1),)))
    assert rank.loaded() == ["r"]
    assert rank.worker.take_bad_blocks() == set()
    assert [rank.block(block) for block in target] == expected[1:]
    assert [rank.block(block) for block in (0, 7, 8, 18, 21, 22, 23)] == untouched
    counts = rank.worker.take_counts()
    assert counts["loaded_blocks"] == len(target)
    assert counts["save_stored_write_behind"] == 3
    assert (rank.worker.take_loaded(), rank.worker.take_saved(), rank.worker.take_counts()) == (set(), [], {})
    assert rank.worker.guard.total == 0


def test_what_is_missing_is_named_and_the_rest_is_right(rank: Rank) -> None:
    chunks = keys(3, 1)
    rank.worker.submit(Work(setting(), saves=(save_job(1, chunks[:1], [1, 2, 3]),)))
    rank.saved()
    expected = [rank.block(block) for block in (1, 2, 3)]
    rank.worker.submit(Work(setting(), loads=(load_job("r", chunks, [4, 5, 6, 7, 8, 9, 10, 11, 12]),)))
    rank.loaded()
    assert rank.worker.take_bad_blocks() == {7, 8, 9, 10, 11, 12}
    assert [rank.block(block) for block in (4, 5, 6)] == expected


def test_jobs_that_make_no_sense_fail_and_are_reported(rank: Rank) -> None:
    """A cache that the scheduler does not speak of, blocks that do not exist, a load that could not be planned."""
    other = Setting(setting().namespace, GEOMETRY, ("layer.0",), PAGE)
    rank.worker.submit(
        Work(other, loads=(load_job("a", keys(1, 2), [1, 2, 3]),), saves=(save_job(1, keys(1, 2), [1, 2, 3]),))
    )
    rank.worker.submit(Work(setting(), saves=(save_job(2, keys(1, 2), [1, 2, BLOCKS]),)))
    rank.worker.submit(Work(setting(), loads=(LoadJob("b", RequestIdentity(), (), (ChunkBlocks(0, 0, (4, 5)),)),)))
    assert sorted(rank.saved(2)) == [1, 2]
    assert sorted(rank.loaded(2)) == ["a", "b"]
    assert rank.worker.take_bad_blocks() == {1, 2, 3, 4, 5}
    assert rank.worker.guard.total == 3
    rank.worker.submit(Work(setting(), loads=(load_job("c", keys(1, 2), [1, 2, 3]),)))
    rank.loaded()
    assert rank.worker.take_bad_blocks() == {1, 2, 3}, "a chunk was stored from blocks that do not exist"


@pytest.mark.parametrize("why", ["aborted", "void"])
def test_loads_that_nobody_wants(rank: Rank, daemon: DaemonProcess, why: str) -> None:
    """Aborted: reported, and its blocks are none of the engine's errors. Void: fails, even where the bytes came."""
    chunks = keys(2, 3)
    rank.worker.submit(Work(setting(), saves=(save_job(1, chunks, [1, 2, 3, 4, 5, 6]),)))
    rank.saved()
    os.kill(daemon.pid, signal.SIGSTOP)
    rank.worker.submit(Work(setting(), loads=(load_job("r", chunks, [7, 8, 9, 10, 11, 12]),)))
    if why == "aborted":
        rank.worker.stop({"r", "another"})
    else:
        rank.worker.submit(Work(void_loads=True))
    assert rank.worker.take_loaded() == set()
    os.kill(daemon.pid, signal.SIGCONT)
    assert rank.loaded() == ["r"]
    assert rank.worker.take_bad_blocks() == (set() if why == "aborted" else {7, 8, 9, 10, 11, 12})


def test_a_frozen_daemon_fails_loads_in_time_and_drops_saves(rank: Rank, daemon: DaemonProcess) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        work = Work(setting(), (load_job("r", keys(1, 4), [1, 2, 3]),), (save_job(1, keys(1, 4), [4, 5, 6]),))
        rank.worker.submit(work)
        assert time.monotonic() - started_s < 0.1, "the engine's thread waited"
        assert rank.loaded() == ["r"]
        assert rank.worker.take_bad_blocks() == {1, 2, 3}
        assert rank.saved() == [1]
        assert time.monotonic() - started_s < 3
        assert not rank.worker.ready
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert rank.worker.take_counts()["save_refused_unavailable"] == 1


def test_a_chunk_of_two_ranks_is_there_when_both_have_stored(daemon: DaemonProcess) -> None:
    ranks = [Rank(daemon, number) for number in range(2)]
    chunks = keys(1, 5)
    for number, rank in enumerate(ranks):
        rank.worker.submit(Work(setting(2), saves=(save_job(1, chunks, [1, 2, 3]),)))
        rank.saved()
        ranks[0].worker.submit(Work(setting(2), loads=(load_job("r", chunks, [4, 5, 6]),)))
        ranks[0].loaded()
        assert ranks[0].worker.take_bad_blocks() == (set() if number else {4, 5, 6})
    ranks[1].worker.submit(Work(setting(2), loads=(load_job("r", chunks, [4, 5, 6]),)))
    ranks[1].loaded()
    for rank in ranks:
        assert [rank.block(block) for block in (4, 5, 6)] == [rank.block(block) for block in (1, 2, 3)]
        rank.worker.close()


def test_of_equal_ranks_the_first_writes_and_all_read(daemon: DaemonProcess) -> None:
    ranks = [Rank(daemon, number, replicas=2) for number in range(2)]
    for rank in ranks[::-1]:
        rank.worker.submit(Work(setting(), saves=(save_job(1, keys(1, 6), [1, 2, 3]),)))
        rank.saved()
    assert [rank.worker.take_counts()["save_stored_write_behind"] for rank in ranks] == [1, 0]
    ranks[1].worker.submit(Work(setting(), loads=(load_job("r", keys(1, 6), [4, 5, 6]),)))
    ranks[1].loaded()
    assert [ranks[1].block(block) for block in (4, 5, 6)] == [ranks[0].block(block) for block in (1, 2, 3)]
    for rank in ranks:
        rank.worker.close()


def test_close_waits_for_the_copy_under_way(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    rank.worker.submit(Work(setting(), saves=tuple(save_job(i, keys(1, 7), [1, 2, 3]) for i in range(50))))
    rank.worker.close()
    rank.worker.close()
