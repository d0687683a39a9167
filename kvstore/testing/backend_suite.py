"""Conformance suite of the backend interface: subclass it, give it the hooks, and pytest runs every rule.

    class TestMyBackend(BackendSuite):
        def open_backend(self, folder): ...
        def flip_byte(self, folder, item, offset): ...
        def cut(self, folder, item): ...

The hooks that damage data must bypass the backend: a suite that trusts what it tests proves nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.backend import Backend, Item
from kvstore.errors import Closed, Corrupt, Invalid
from kvstore.layout import SlotLayout
from kvstore.testing.chunks import ROOT, aligned, filled, grouped_layout, layout_of, make_key, payload_of
from kvstore.units import KiB, MiB

SMALL = layout_of(8 * KiB)


class BackendSuite:
    """One folder a test; `open_backend` may be called again on it after a close."""

    sequence = 0

    # -- hooks -----------------------------------------------------------------------------------------------------

    def open_backend(self, folder: Path) -> Backend:
        """Open (or open again) the backend over this folder, ready for use."""
        raise NotImplementedError

    def place(self, backend: Backend, layout: SlotLayout, count: int) -> list[int]:
        """Places for new items; slotted backends need real ones."""
        return [0] * count

    def flip_byte(self, folder: Path, item: Item, offset: int) -> None:
        """Change one byte of the item's stored payload, without the backend. The backend may be open."""
        raise NotImplementedError

    def cut(self, folder: Path, item: Item) -> None:
        """Cut the item's stored bytes in the middle, and all that follows in that file. The backend may be open."""
        raise NotImplementedError

    # -- helpers ---------------------------------------------------------------------------------------------------

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        backend = self.open_backend(tmp_path)
        yield backend
        backend.close()

    def new_items(self, backend: Backend, count: int, layout: SlotLayout = SMALL, pool: int = 0) -> list[Item]:
        places = self.place(backend, layout, count)
        items = []
        for place in places:
            self.sequence += 1
            items.append(Item(ROOT, pool, make_key(self.sequence), layout, place=place, sequence=self.sequence))
        return items

    def store(self, backend: Backend, count: int, layout: SlotLayout = SMALL, durable: bool = False) -> list[Item]:
        items = self.new_items(backend, count, layout)
        assert backend.write(items, filled(items), durable) == [None] * count
        return items

    def read(self, backend: Backend, item: Item) -> bytes | None:
        """The stored bytes, None where absent."""
        buffer = aligned(item.layout.slot_bytes)
        return bytes(buffer) if backend.read_into(item, buffer) else None

    def check_intact(self, backend: Backend, items: Sequence[Item]) -> None:
        for item in items:
            assert self.read(backend, item) == payload_of(item)

    # -- rules -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size_bytes", [1, 4 * KiB, 5000, 1 * MiB, 3 * MiB])
    @pytest.mark.parametrize("durable", [False, True])
    def test_what_was_written_is_read(self, backend: Backend, size_bytes: int, durable: bool) -> None:
        items = self.store(backend, 3, layout_of(size_bytes), durable)
        for item in items:
            got = self.read(backend, item)
            assert got is not None
            assert got[:size_bytes] == payload_of(item)[:size_bytes]

    def test_a_large_batch_of_small_chunks(self, backend: Backend) -> None:
        items = self.store(backend, 700)
        self.check_intact(backend, items[::50])
        assert backend.contains(items) == [True] * len(items)

    def test_absent_is_a_value(self, backend: Backend) -> None:
        (stored,) = self.store(backend, 1)
        other = replace(stored, key=make_key(0, seed=9))
        assert self.read(backend, other) is None
        assert backend.contains([other, stored]) == [False, True]
        backend.delete([other])
        self.check_intact(backend, [stored])

    @pytest.mark.parametrize("field", ["root", "pool", "key"])
    def test_each_identity_field_counts(self, backend: Backend, field: str) -> None:
        (item,) = self.store(backend, 1)
        changed = {"root": bytes(32), "pool": 7, "key": bytes(32)}[field]
        assert self.read(backend, replace(item, **{field: changed})) is None  # type: ignore[arg-type]

    def test_write_leaves_the_buffers_alone(self, backend: Backend) -> None:
        items = self.new_items(backend, 2)
        buffers = filled(items)
        before = [bytes(buffer) for buffer in buffers]
        backend.write(items, buffers)
        assert [bytes(buffer) for buffer in buffers] == before

    def test_one_bad_item_does_not_hurt_the_others(self, backend: Backend) -> None:
        items = self.new_items(backend, 3)
        buffers = filled(items)
        buffers[1] = aligned(4 * KiB)
        results = backend.write(items, buffers)
        assert [type(result) for result in results] == [type(None), Invalid, type(None)]
        self.check_intact(backend, [items[0], items[2]])
        assert backend.contains(items) == [True, False, True]

    def test_an_empty_batch(self, backend: Backend) -> None:
        assert backend.write([], []) == []
        assert backend.contains([]) == []
        backend.delete([])

    def test_groups_are_whole_when_reported(self, backend: Backend) -> None:
        layout = grouped_layout(shards=2, parts=6)
        assert len(layout.groups) > 2
        (item,) = self.store(backend, 1, layout)
        expected, buffer = payload_of(item), aligned(layout.slot_bytes)
        seen: list[int] = []

        def on_group(number: int) -> None:
            for offset, length in layout.groups[number].extents:
                assert buffer[offset : offset + length] == expected[offset : offset + length]
            seen.append(number)

        assert backend.read_into(item, buffer, on_group)
        assert seen == list(range(len(layout.groups)))

    @pytest.mark.parametrize("offset", [0, 4097, 8 * KiB - 1])
    def test_a_flipped_byte_is_corrupt_and_alone(self, backend: Backend, tmp_path: Path, offset: int) -> None:
        items = self.store(backend, 3, durable=True)
        self.flip_byte(tmp_path, items[1], offset)
        with pytest.raises(Corrupt):
            self.read(backend, items[1])
        self.check_intact(backend, [items[0], items[2]])
        assert backend.contains([items[0], items[2]]) == [True, True]

    def test_a_flipped_byte_in_a_late_group(self, backend: Backend, tmp_path: Path) -> None:
        layout = grouped_layout(shards=1, parts=4)
        (item,) = self.store(backend, 1, layout, durable=True)
        self.flip_byte(tmp_path, item, layout.slot_bytes - 1)
        seen: list[int] = []
        with pytest.raises(Corrupt):
            backend.read_into(item, aligned(layout.slot_bytes), seen.append)
        assert seen == list(range(len(layout.groups) - 1))

    def test_cut_bytes_are_never_served(self, backend: Backend, tmp_path: Path) -> None:
        items = self.store(backend, 2, layout_of(64 * KiB), durable=True)
        last = max(items, key=lambda item: item.place)
        self.cut(tmp_path, last)
        with pytest.raises(Corrupt):
            self.read(backend, last)

    def test_delete_is_for_good(self, backend: Backend, tmp_path: Path) -> None:
        items = self.store(backend, 4)
        backend.delete(items[:2])
        backend.delete(items[:1])
        assert backend.contains(items) == [False, False, True, True]
        backend.close()
        again = self.open_backend(tmp_path)
        assert [self.read(again, item) is not None for item in items] == [False, False, True, True]
        again.close()

    def test_scan_gives_every_live_record(self, backend: Backend) -> None:
        items = self.store(backend, 5) + self.store(backend, 2, layout_of(1 * MiB))
        backend.delete(items[:1])
        found = {item.key: item for item in backend.scan()}
        assert set(found) == {item.key for item in items[1:]}
        for item in items[1:]:
            copy = found[item.key]
            assert (copy.root, copy.pool, copy.parent) == (item.root, item.pool, item.parent)
            assert self.read(backend, copy) == payload_of(item)

    def test_everything_is_there_after_an_orderly_close(self, backend: Backend, tmp_path: Path) -> None:
        items = self.store(backend, 5)
        backend.close()
        again = self.open_backend(tmp_path)
        self.check_intact(again, items)
        assert {item.key for item in again.scan()} == {item.key for item in items}
        again.close()

    def test_many_threads(self, backend: Backend) -> None:
        batches = [self.new_items(backend, 8, layout_of(64 * KiB)) for _ in range(8)]

        def work(items: list[Item]) -> None:
            assert backend.write(items, filled(items)) == [None] * len(items)
            self.check_intact(backend, items)
            backend.delete(items[:1])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, batches))
        for items in batches:
            assert backend.contains(items) == [False] + [True] * 7

    def test_close_is_idempotent_and_final(self, backend: Backend) -> None:
        (item,) = self.store(backend, 1)
        backend.close()
        backend.close()
        for call in (
            lambda: self.read(backend, item),
            lambda: backend.write([item], filled([item])),
            lambda: backend.contains([item]),
            lambda: backend.delete([item]),
            lambda: list(backend.scan()),
        ):
            with pytest.raises(Closed):
                call()

    def test_close_waits_for_calls_in_flight(self, backend: Backend) -> None:
        items = self.new_items(backend, 16, layout_of(1 * MiB))
        buffers = filled(items)
        started, results = threading.Event(), []

        def work() -> None:
            for item, buffer in zip(items, buffers, strict=True):
                try:
                    results.append(backend.write([item], [buffer]))
                except Closed:
                    results.append([Closed()])
                started.set()

        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        backend.close()
        thread.join()
        kinds = [type(result[0]) for result in results]
        assert kinds[0] is type(None)
        assert kinds == sorted(kinds, key=lambda kind: kind is Closed), "written, then Closed, never anything else"
