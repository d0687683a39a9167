"""durable=True means on SSD, also for what was there before."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.codes import Ack
from kvstore.keys import NO_PARENT
from kvstore.layout import one_part_pool
from kvstore.namespace import BaseNamespace
from kvstore.testing.daemon import DaemonProcess
from kvstore.units import MiB

_NAMESPACE = BaseNamespace(model="durable", weights="none", pools=(one_part_pool(1 * MiB),))


def _store(daemon: DaemonProcess, keys: list[bytes], durable: bool) -> list[Ack]:
    buffers = [np.full(1 * MiB, key[0], np.uint8) for key in keys]
    with Client(daemon.socket_path, deadline_s=2.0) as client:
        assert client.wait_connected(10)
        return client.root(_NAMESPACE).batch_set(keys, [NO_PARENT] * len(keys), buffers, durable=durable)


def _wait_for(daemon: DaemonProcess, line: str) -> None:
    deadline_s = time.monotonic() + 10
    while line not in daemon.log_tail():
        assert time.monotonic() < deadline_s, daemon.log_tail()
        time.sleep(0.02)


def test_a_durable_store_of_chunks_that_exist_only_in_dram_survives_a_kill(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    """A batch was stored while the write budget kept it in DRAM only. Stored again with durable=True every key was
    answered EXISTS at once, nothing was written, and the chunks were gone after a crash."""
    daemon = make_daemon(settings={"ssd.write_bytes_per_second": 1})
    keys = [os.urandom(32) for _ in range(40)]  # several commits
    assert set(_store(daemon, keys, durable=False)) == {Ack.STORED_DRAM}
    text = daemon.config_path.read_text()
    daemon.config_path.write_text(re.sub(r"(write_bytes_per_second\W+)1\b", r"\g<1>0", text))
    daemon.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
    _wait_for(daemon, "settings reloaded")
    extra = [os.urandom(32) for _ in range(3)]
    acks = _store(daemon, [*keys[:20], *extra, *keys[20:]], durable=True)
    assert set(acks) == {Ack.STORED_SSD}
    daemon.kill()
    daemon.start()
    with Client(daemon.socket_path, deadline_s=2.0) as client:
        assert client.wait_connected(10)
        root = client.root(_NAMESPACE)
        out = [np.empty(1 * MiB, np.uint8)]
        for key in [*keys, *extra]:
            assert root.batch_get([key], out)[0].hit
            assert (out[0] == key[0]).all()


def test_a_chunk_that_the_arena_can_never_hold_is_refused_with_a_reason(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Every store of 512 MiB chunks into an arena of 256 MiB was REFUSED_INVALID, for ever, and nothing said why."""
    namespace = BaseNamespace(model="large", weights="none", pools=(one_part_pool(512 * MiB),))
    with Client(daemon.socket_path, deadline_s=2.0) as client:
        assert client.wait_connected(10)
        root = client.root(namespace)
        for _ in range(2):
            assert root.batch_exists([os.urandom(32)]) == 0
        assert "enlarge arena.size" in client.last_error
    assert len([record for record in caplog.records if "enlarge arena.size" in record.getMessage()]) == 1
