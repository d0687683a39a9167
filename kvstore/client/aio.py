"""The asyncio face, for services: the same verbs, each on a thread of a small pool. Engines use `Client` itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from kvstore.client.client import Client
from kvstore.client.copying import Buffer
from kvstore.client.root import Lookup, Root
from kvstore.codes import Ack, Load
from kvstore.namespace import BaseNamespace, RequestIdentity

P = ParamSpec("P")
T = TypeVar("T")


class AsyncClient:
    """`async with await AsyncClient.open(...) as client`. One event loop; close it there."""

    def __init__(self, client: Client, threads: int = 4) -> None:
        self.client = client
        self._threads = ThreadPoolExecutor(threads, "kvstore-aio")

    @classmethod
    async def open(cls, socket_path: str | Path | None = None, *, threads: int = 4, **settings: Any) -> AsyncClient:
        """Settings as for `Client`."""
        return cls(await asyncio.to_thread(partial(Client, socket_path, **settings)), threads)

    def root(
        self, namespace: BaseNamespace, identity: RequestIdentity | None = None, pool: str | None = None
    ) -> AsyncRoot:
        return AsyncRoot(self.client.root(namespace, identity, pool), self.run)

    async def run(self, verb: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Any blocking verb. When cancelled, it waits for the thread first: until then buffers are being copied."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, partial(verb, *args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue
            raise

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)
        self._threads.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class AsyncRoot:
    """The verbs of `Root`; `root` is the blocking one, for `AsyncClient.run` with the others (lease, reserve, pin)."""

    def __init__(self, root: Root, run: Callable[..., Any]) -> None:
        self.root = root
        self._run = run

    async def lookup(self, keys: Sequence[bytes]) -> Lookup:
        return await self._run(self.root.lookup, keys)  # type: ignore[no-any-return]

    async def batch_get(self, keys: Sequence[bytes], out_buffers: Sequence[Buffer], **options: Any) -> list[Load]:
        return await self._run(self.root.batch_get, keys, out_buffers, **options)  # type: ignore[no-any-return]

    async def batch_set(
        self, keys: Sequence[bytes], parents: Sequence[bytes] | None, buffers: Sequence[Buffer], **options: Any
    ) -> list[Ack]:
        return await self._run(self.root.batch_set, keys, parents, buffers, **options)  # type: ignore[no-any-return]
