"""Backends that misbehave on purpose, around a real one: for tests of whoever uses a backend."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvstore.backend import Backend, Item
from kvstore.errors import Corrupt, Full, KVStoreError, Unavailable


class WrappedBackend(Backend):
    """Passes everything on; attributes it does not have are the inner one's."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.slotted = inner.slotted

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def read_into(self, item: Item, buffer: memoryview, on_group: Callable[[int], None] | None = None) -> bool:
        return self.inner.read_into(item, buffer, on_group)

    def write(
        self, items: Sequence[Item], buffers: Sequence[memoryview], durable: bool = False
    ) -> list[KVStoreError | None]:
        return self.inner.write(items, buffers, durable)

    def contains(self, items: Sequence[Item]) -> list[bool]:
        return self.inner.contains(items)

    def delete(self, items: Sequence[Item]) -> None:
        self.inner.delete(items)

    def scan(self) -> Iterator[Item]:
        return self.inner.scan()

    def close(self) -> None:
        self.inner.close()


class FaultyBackend(WrappedBackend):
    """Fails a share of the calls, before or after the inner backend has done its work. Thread-safe.

    The seed is printed, so that a failing run can be played again. A failed write may have been stored all the same:
    that is what a lost answer looks like. `Corrupt` reads leave the buffer half filled.
    """

    def __init__(self, inner: Backend, *, share: float = 0.2, seed: int | None = None) -> None:
        super().__init__(inner)
        self.share = share
        self.seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        self.failures = 0
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        print(f"FaultyBackend(seed={self.seed}, share={share})", file=sys.stderr)

    def _draw(self) -> float:
        """Below `share`: fail. The lower half of that: before doing the work."""
        with self._lock:
            value = self._random.random()
            self.failures += value < self.share
            return value

    def read_into(self, item: Item, buffer: memoryview, on_group: Callable[[int], None] | None = None) -> bool:
        value = self._draw()
        if value < self.share / 2:
            raise Unavailable("injected: the device does not answer")
        found = self.inner.read_into(item, buffer, on_group if value >= self.share else None)
        if found and value < self.share:
            raise Corrupt("injected: the bytes do not match")
        return found

    def write(
        self, items: Sequence[Item], buffers: Sequence[memoryview], durable: bool = False
    ) -> list[KVStoreError | None]:
        value = self._draw()
        if value < self.share / 2:
            return [Full("injected: no space") for _ in items]
        results = self.inner.write(items, buffers, durable)
        if value < self.share:
            return [Unavailable("injected: the answer got lost") for _ in results]
        return results

    def delete(self, items: Sequence[Item]) -> None:
        if self._draw() < self.share:
            raise Unavailable("injected: the device does not answer")
        self.inner.delete(items)


class SlowBackend(WrappedBackend):
    """Every read and write takes `delay_s` longer, times a random factor of 0.5 to 1.5 (the seed is printed)."""

    def __init__(self, inner: Backend, delay_s: float, *, seed: int | None = None) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self.seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        print(f"SlowBackend(seed={self.seed}, delay_s={delay_s})", file=sys.stderr)

    def _wait(self) -> None:
        with self._lock:
            factor = self._random.uniform(0.5, 1.5)
        time.sleep(self.delay_s * factor)

    def read_into(self, item: Item, buffer: memoryview, on_group: Callable[[int], None] | None = None) -> bool:
        self._wait()
        return self.inner.read_into(item, buffer, on_group)

    def write(
        self, items: Sequence[Item], buffers: Sequence[memoryview], durable: bool = False
    ) -> list[KVStoreError | None]:
        self._wait()
        return self.inner.write(items, buffers, durable)
