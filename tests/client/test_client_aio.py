"""The asyncio face, against a real daemon process."""

from __future__ import annotations

import asyncio
import threading

import pytest
from client_tools import chunk, chunks, empty, fresh_keys, namespace

from kvstore.client.aio import AsyncClient
from kvstore.codes import Load
from kvstore.testing.daemon import DaemonProcess


@pytest.mark.asyncio
async def test_the_verbs_do_not_block_the_loop(daemon: DaemonProcess) -> None:
    async with await AsyncClient.open(daemon.socket_path, deadline_s=2.0) as client:
        root = client.root(namespace())
        keys, others = fresh_keys(3), fresh_keys(3)
        acks = await asyncio.gather(*(root.batch_set(batch, None, chunks(batch)) for batch in (keys, others)))
        assert all(ack.stored for answer in acks for ack in answer)
        out = empty(3)
        assert await root.batch_get(keys, out) == [Load.DRAM] * 3
        assert (out[2] == chunk(keys[2])).all()
        assert (await root.lookup(others)).run == 3
        lease = await client.run(root.root.lease, keys)
        assert lease.run == 3
        await client.run(lease.release)


@pytest.mark.asyncio
async def test_a_cancelled_call_returns_only_when_its_thread_has_left_the_buffers(daemon: DaemonProcess) -> None:
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def slow_verb() -> None:
        entered.set()
        leave.wait()
        left.set()

    async with await AsyncClient.open(daemon.socket_path) as client:
        task = asyncio.create_task(client.run(slow_verb))
        await asyncio.to_thread(entered.wait)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert left.is_set()
