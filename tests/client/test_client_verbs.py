"""The verbs against a real daemon process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from client_tools import CHUNK_BYTES, admin, chunk, chunks, empty, eventually, fresh_keys, namespace, sharded_namespace

from kvstore.client import Ack, Client, Load, Root, Tier
from kvstore.errors import Invalid
from kvstore.keys import NO_PARENT
from kvstore.layout import PartRow, PoolSpec
from kvstore.namespace import BaseNamespace, RequestIdentity
from kvstore.testing.daemon import DaemonProcess
from kvstore.units import KiB, MiB


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One for all tests here: each uses keys of its own."""
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), arena_bytes=128 * MiB, ssd_bytes=512 * MiB) as running:
        yield running


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.socket_path, label="test", deadline_s=2.0) as connected:
        assert connected.wait_connected(5), connected.last_error
        yield connected


@pytest.fixture
def root(client: Client) -> Root:
    return client.root(namespace())


def test_set_then_get_gives_the_same_bytes(root: Root) -> None:
    keys = fresh_keys(8)
    out = empty(8)
    assert all(ack.stored for ack in root.batch_set(keys, None, chunks(keys)))
    assert root.batch_get(keys, out) == [Load.DRAM] * 8
    for key, got in zip(keys, out, strict=True):
        assert (got == chunk(key)).all()


def test_setting_again_answers_exists_and_changes_nothing(root: Root) -> None:
    keys = fresh_keys(3)
    root.batch_set(keys, None, chunks(keys))
    assert root.batch_set(keys, None, empty(3)) == [Ack.EXISTS] * 3
    out = empty(3)
    root.batch_get(keys, out)
    assert (out[2] == chunk(keys[2])).all()


def test_get_of_nothing_is_a_miss_and_what_follows_is_not_looked_at(root: Root) -> None:
    keys = fresh_keys(4)
    root.batch_set(keys[:2], None, chunks(keys[:2]))
    out = empty(4)
    assert root.batch_get(keys, out) == [Load.DRAM, Load.DRAM, Load.MISS_UNKNOWN, Load.MISS_AFTER_GAP]
    assert not out[2].any()
    assert root.batch_get([], []) == []
    assert root.batch_set([], None, []) == []


def test_bad_keys_and_buffers_cost_the_others_nothing(root: Root) -> None:
    keys = fresh_keys(6)
    batch = [keys[0], b"short", keys[1], keys[0], keys[2], keys[3]]
    parents = [NO_PARENT] * 6
    data = [*chunks([keys[0], keys[0], keys[1], keys[0]]), chunk(keys[2])[1:], chunk(keys[3])]
    acks = root.batch_set(batch, parents, data)
    invalid = Ack.REFUSED_INVALID
    assert [ack if ack.refused else None for ack in acks] == [None, invalid, None, invalid, invalid, None]
    out = [*empty(4), np.zeros(7, np.uint8), *empty(1)]
    loads = root.batch_get(batch, out)
    miss = Load.MISS_INVALID
    assert loads == [Load.DRAM, miss, Load.DRAM, miss, miss, Load.DRAM]
    for got, key in ((out[0], keys[0]), (out[2], keys[1]), (out[5], keys[3])):
        assert (got == chunk(key)).all()


def test_short_lists_wrong_shards_and_foreign_objects_are_invalid(root: Root) -> None:
    keys = fresh_keys(3)
    assert root.batch_set(keys, [NO_PARENT], chunks(keys))[1:] == [Ack.REFUSED_INVALID] * 2
    assert root.batch_set(keys, None, chunks(keys), shard=1) == [Ack.REFUSED_INVALID] * 3
    assert root.batch_get(keys[:1], [], shard=0) == [Load.MISS_INVALID]
    assert root.batch_get(keys, empty(3), shard=-1) == [Load.MISS_INVALID] * 3
    assert root.batch_get([None, 3, "x" * 32], empty(3)) == [Load.MISS_INVALID] * 3  # type: ignore[list-item]


def test_the_child_of_a_malformed_key_is_an_orphan(root: Root) -> None:
    first, last = fresh_keys(2)
    acks = root.batch_set([first, b"bad", last], None, chunks([first, first, last]))
    assert acks[0].stored
    assert acks[1:] == [Ack.REFUSED_INVALID, Ack.REFUSED_ORPHAN]


def test_lookup_finds_the_leading_run_over_several_windows(root: Root, client: Client) -> None:
    small = client.root(namespace(4 * KiB))
    keys = fresh_keys(700)
    assert all(ack.stored for ack in small.batch_set(keys, None, chunks(keys, 4 * KiB)))
    assert small.lookup(keys).run == 700
    assert small.batch_exists([*keys, *fresh_keys(3)]) == 700
    answer = small.lookup([*keys[:100], *fresh_keys(1), *keys[100:]])
    assert (answer.run, set(answer.tiers[:100])) == (100, {Tier.DRAM})
    assert small.lookup([*keys[:70], b"malformed", *keys[70:]]).run == 70
    assert small.lookup([]).run == 0
    assert root.lookup(keys).run == 0, "another shape is another namespace"


def test_pools_without_a_chain_answer_key_by_key(client: Client) -> None:
    pool = client.root(namespace(rule="exact"))
    keys = fresh_keys(4)
    pool.batch_set([keys[1], keys[3]], [NO_PARENT] * 2, chunks([keys[1], keys[3]]))
    assert [tier == Tier.DRAM for tier in pool.lookup(keys).tiers] == [False, True, False, True]
    batch = [keys[0], b"bad", keys[1], keys[2], keys[3]]
    assert [tier == Tier.DRAM for tier in pool.lookup(batch).tiers] == [False, False, True, False, True]
    out = empty(5)
    unknown, invalid = Load.MISS_UNKNOWN, Load.MISS_INVALID
    assert pool.batch_get(batch, out) == [unknown, invalid, Load.DRAM, unknown, Load.DRAM]
    assert (out[4] == chunk(keys[3])).all()


def test_a_chunk_is_there_when_all_its_shards_are(client: Client) -> None:
    wide = client.root(sharded_namespace(shards=2, parts=3, part_bytes=20 * KiB))
    keys = fresh_keys(2)
    shard_bytes = 60 * KiB
    halves = [[chunk(key[::step], shard_bytes) for key in keys] for step in (1, -1)]
    assert wide.batch_set(keys, None, halves[0], shard=0) == [Ack.PARTIAL] * 2
    assert wide.lookup(keys).run == 0
    assert all(ack.stored for ack in wide.batch_set(keys, None, halves[1], shard=1))
    for shard in (0, 1):
        out = empty(2, shard_bytes)
        assert wide.batch_get(keys, out, shard=shard) == [Load.DRAM] * 2
        assert all((got == want).all() for got, want in zip(out, halves[shard], strict=True))
    with wide.lease(keys) as view:
        assert bytes(view.view(1, shard=1)) == halves[1][1].tobytes()
        assert bytes(view.view(1, shard=1, part=2)) == halves[1][1].tobytes()[40 * KiB :]


def test_pieces_are_scattered_and_gathered(root: Root) -> None:
    (key,) = fresh_keys(1)
    data = chunk(key)
    cut = 100_001
    acks = root.batch_set([key], None, [[data[:cut], memoryview(data[cut:].copy())]])
    assert acks[0].stored
    left, right = np.zeros(4096, np.uint8), np.zeros(CHUNK_BYTES - 4096, np.uint8)
    assert root.batch_get([key], [[left, (right.ctypes.data, right.nbytes)]]) == [Load.DRAM]
    assert left.tobytes() + right.tobytes() == data.tobytes()


def test_a_lease_shows_the_bytes_in_place_and_read_only(root: Root) -> None:
    keys = fresh_keys(3)
    root.batch_set(keys[:2], None, chunks(keys[:2]))
    with root.lease([*keys[:2], b"bad", keys[2]]) as view:
        assert view.codes == [Load.DRAM, Load.DRAM, Load.MISS_INVALID, Load.MISS_UNKNOWN]
        assert view.run == 2
        assert view.view(1).readonly
        assert view.wait(1, 0, 0.0)
        assert bytes(view.view(1)) == chunk(keys[1]).tobytes()
        assert view.valid(1)
        assert view.renew()
        assert (len(view.view(3)), view.valid(3), view.wait(3, 0, 0.0)) == (0, False, False)
    assert not view.renew()
    view.release()


def test_leases_and_reservations_end_in_the_daemon_too(daemon: DaemonProcess, root: Root, client: Client) -> None:
    keys = fresh_keys(4)
    root.batch_set(keys[:2], None, chunks(keys[:2]))

    def held() -> list[int]:
        sessions = admin(daemon.admin_path, "status")["sessions"]
        mine = next(row for row in sessions if row["id"].startswith(client.session.hex()[:8]))
        return [mine["leases"], mine["reservations"]]

    with root.lease(keys[:2]), root.reserve(keys[2:]) as reservation:
        assert reservation.codes == [Ack.GRANTED] * 2
        assert held() == [1, 1]
    eventually(lambda: held() == [0, 0], "both ended with their contexts")
    dropped = root.lease(keys[:2])
    assert held() == [1, 0]
    del dropped
    eventually(lambda: held() == [0, 0], "a lease that was only dropped is released in the background")
    pin = root.pin(keys[:2])
    assert pin.codes == [Load.DRAM] * 2
    assert pin.unpin()
    assert not pin.unpin()


def test_reserve_write_in_place_commit(root: Root) -> None:
    keys = fresh_keys(3)
    batch = [keys[0], b"bad", keys[1]]
    with root.reserve(batch, [NO_PARENT, NO_PARENT, keys[0]]) as reservation:
        assert reservation.codes == [Ack.GRANTED, Ack.REFUSED_INVALID, Ack.GRANTED]
        assert len(reservation.view(1)) == 0
        for i in (0, 2):
            np.frombuffer(reservation.view(i), np.uint8)[:] = chunk(batch[i])
        acks = reservation.commit()
        assert [acks[0].stored, acks[1], acks[2].stored] == [True, Ack.REFUSED_INVALID, True]
        assert len(reservation.view(0)) == 0, "nothing is written after the commit"
        assert reservation.commit() == acks
    out = empty(2)
    assert root.batch_get(keys[:2], out) == [Load.DRAM] * 2
    assert (out[1] == chunk(keys[1])).all()
    aborted = root.reserve(keys[2:])
    aborted.abort()
    assert aborted.commit() == [Ack.REFUSED_CLOSED]
    assert root.lookup(keys[2:]).run == 0


def test_durable_means_on_ssd(root: Root) -> None:
    keys = fresh_keys(4)
    assert root.batch_set(keys, None, chunks(keys), durable=True) == [Ack.STORED_SSD] * 4
    with root.reserve(fresh_keys(1)) as reservation:
        assert reservation.commit(durable=True) == [Ack.STORED_SSD]


def test_a_batch_larger_than_the_arena_is_stored_as_far_as_it_fits_and_loaded_from_ssd(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon(arena_bytes=64 * MiB, ssd_bytes=512 * MiB)
    with Client(daemon.socket_path, deadline_s=5.0) as client:
        root = client.root(namespace(MiB))
        keys = fresh_keys(96)
        data = chunks(keys, MiB)
        acks = root.batch_set(keys, None, data)
        fit = sum(ack.stored for ack in acks)
        assert 0 < fit < 96
        assert acks[fit] is Ack.REFUSED_FULL
        assert not any(ack.stored for ack in acks[fit:])
        for first in range(fit, 96, 8):
            parents = keys[first - 1 : first + 7]

            def put(first: int = first, parents: list[bytes] = parents) -> bool:
                acks = root.batch_set(keys[first : first + 8], parents, data[first : first + 8])
                return all(ack.stored for ack in acks)

            eventually(put, "stored once the SSD has taken what was before", within_s=20)
        out = empty(96, MiB)
        loads = root.batch_get(keys, out)
        assert all(load.hit for load in loads), loads
        assert Load.SSD in loads
        assert all((got == want).all() for got, want in zip(out, data, strict=True))


def test_many_threads_share_a_client(root: Root) -> None:
    failures: list[str] = []

    def work() -> None:
        for _ in range(10):
            keys = fresh_keys(4)
            out = empty(4)
            acks = root.batch_set(keys, None, chunks(keys))
            loads = root.batch_get(keys, out)
            for key, got, ack, load in zip(keys, out, acks, loads, strict=True):
                if load.hit and not (got == chunk(key)).all():
                    failures.append("wrong bytes")
                if not ack.stored and ack is not Ack.REFUSED_BACKPRESSURE:
                    failures.append(ack.name)

    threads = [threading.Thread(target=work) for _ in range(20)]  # more than there are connections
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_copy_threads_give_the_same_bytes(daemon: DaemonProcess) -> None:
    with Client(daemon.socket_path, deadline_s=2.0, copy_threads=2) as client:
        root = client.root(namespace(2 * MiB))
        keys = fresh_keys(5)
        out = empty(5, 2 * MiB)
        assert all(ack.stored for ack in root.batch_set(keys, None, chunks(keys, 2 * MiB)))
        assert root.batch_get(keys, out) == [Load.DRAM] * 5
        assert all((got == chunk(key, 2 * MiB)).all() for key, got in zip(keys, out, strict=True))


def test_a_session_is_shared_by_its_clients(daemon: DaemonProcess) -> None:
    session = os.urandom(16)
    with (
        Client(daemon.socket_path, session=session) as scheduler,
        Client(daemon.socket_path, session=session) as worker,
    ):
        keys = fresh_keys(2)
        worker.root(namespace()).batch_set(keys, None, chunks(keys))
        assert scheduler.root(namespace()).batch_exists(keys) == 2


def test_roots_are_apart_and_the_same_arguments_give_the_same_object(client: Client) -> None:
    space = namespace()
    root, salted = client.root(space), client.root(space, RequestIdentity(salt="s"))
    assert client.root(space) is root
    assert root.digest != salted.digest
    keys = fresh_keys(1)
    root.batch_set(keys, None, chunks(keys))
    assert salted.batch_exists(keys) == 0


def test_what_can_never_work_is_said_at_once(client: Client) -> None:
    with pytest.raises(Invalid, match="no pool 'other'"):
        client.root(namespace(), pool="other")
    with pytest.raises(Invalid, match="model"):
        client.root(BaseNamespace(model="", weights="w", pools=namespace().pools))
    rows = tuple(PartRow(0, i * 4096, 4096, layout="x" * 300) for i in range(4096))
    with pytest.raises(Invalid, match="frame"):
        client.root(BaseNamespace(model="m", weights="w", pools=(PoolSpec(rows),)))
    with pytest.raises(Invalid, match="session"):
        Client(Path("/nowhere"), session=b"short")
    with pytest.raises(Invalid, match="positive"):
        Client(Path("/nowhere"), deadline_s=0)


def test_statistics_say_what_happened(client: Client, root: Root) -> None:
    keys = fresh_keys(2)
    root.batch_set(keys, None, chunks(keys))
    root.batch_get([*keys, *fresh_keys(1)], empty(3))
    stats = client.stats()
    assert {"load_dram": 2, "load_miss_unknown": 1}.items() <= stats["client"].items()
    assert stats["daemon"]["schema"] == 1
    rtt_s = client.ping()
    assert rtt_s is not None
    assert 0 < rtt_s < 2
