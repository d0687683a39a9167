"""docs/formats.md says what the code does: every kind, number, field and offset in it is looked up in the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from kvstore.arena.control import FAILED, control_size, pages_of
from kvstore.backends.ssd import formats as ssd
from kvstore.codes import Ack, Gone, Load, Tier
from kvstore.layout import MAX_EXTENTS, PartRow, PoolSpec
from kvstore.namespace import BaseNamespace, Parallel, RequestIdentity
from kvstore.record import Header, pack
from kvstore.wire.frame import HEAD_BYTES, encode
from kvstore.wire.messages import BY_KIND, MAX_FRAME_BYTES, MAX_IN_FLIGHT, MAX_KEYS, Done, Message

TEXT = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()


def section(title: str) -> str:
    """The text under a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\b.*?$(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/formats.md has no section {title!r}"
    return found[1]


def table(title: str) -> list[list[str]]:
    """The cells of the section's table rows, without its head."""
    rows = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def described(cls: type[Message]) -> str:
    """A message's fields as the document writes them."""
    hints = get_type_hints(cls)
    texts = []
    for field in msgspec.structs.fields(cls):
        kind = hints[field.name]
        text = f"{field.name}: {'map' if getattr(kind, '__origin__', None) is dict else kind.__name__}"
        if field.default is not msgspec.NODEFAULT:
            text += " = " + msgspec.json.encode(field.default).decode()
        elif field.default_factory is not msgspec.NODEFAULT:
            text += " = {}"
        texts.append(f"`{text}`")
    return ", ".join(texts)


def test_every_message_with_its_number_fields_and_defaults() -> None:
    documented = {int(row[0]): (row[1], row[2]) for row in table("Messages")}
    assert documented == {kind: (cls.__name__, described(cls)) for kind, cls in BY_KIND.items()}
    assert len(table("Messages")) == len(BY_KIND)


@pytest.mark.parametrize("codes", [Tier, Ack, Load, Gone])
def test_every_code_with_its_number_and_a_meaning(codes: type[Tier]) -> None:
    rows = table(codes.__name__)
    assert [(int(row[0]), row[1]) for row in rows] == [(int(code), code.name) for code in codes]
    assert all(row[2] for row in rows)


def test_every_field_of_an_identity() -> None:
    rows = dict(line.strip("| ").split(" | ") for line in section("Identity").splitlines() if line.endswith("` |"))
    for kind in (BaseNamespace, Parallel, PoolSpec, PartRow, RequestIdentity):
        assert rows[kind.__name__].replace("`", "").split() == [field.name for field in msgspec.structs.fields(kind)]


def read(title: str, block: bytes) -> dict[str, Any]:
    """Fields of a block, taken from where the document says they are: numbers up to 8 bytes, else bytes.

    Also checks that the rows leave no gap.
    """
    values: dict[str, Any] = {}
    end = 0
    for offset, size, name, meaning in table(title):
        if not (offset + size).isdecimal():
            break
        assert int(offset) == end, f"{title}: {name} does not follow the field before it"
        end += int(size)
        raw = block[int(offset) : end]
        number = len(raw) <= 8 and name != "magic"
        values[name] = int.from_bytes(raw, "little") if number else raw
        assert ("u64" not in meaning) or size == "8"
        assert ("u32" not in meaning) or size == "4"
    return values | {"end": end}


def magic(title: str) -> bytes:
    """`NAME` 0 1 -> the bytes."""
    name, numbers = re.fullmatch(r"`(\w+)`([ 0-9]*)", table(title)[0][3]).groups()  # type: ignore[union-attr]
    return name.encode() + bytes(int(number) for number in numbers.split())


def test_the_frame_head() -> None:
    data = encode(Done(), 0x01020304)
    values = read("Frames", data)
    assert values == {"length": 1, "kind": Done.KIND, "reserved": 0, "request": 0x01020304, "end": HEAD_BYTES}
    for limit in (f"({MAX_FRAME_BYTES >> 20} MiB)", f"`MAX_KEYS` ({MAX_KEYS})", f"`MAX_IN_FLIGHT` ({MAX_IN_FLIGHT})"):
        assert limit in section("Frames")


def test_the_record_header() -> None:
    header = Header(b"r" * 32, 3, b"k" * 32, b"p" * 32, 7, 8, 9, ((0, 4096), (4096, 9)), (b"a" * 16, b"b" * 16))
    block = pack(header)
    values = read("Record header", block)
    end = values.pop("end")
    assert values.pop("magic") == magic("Record header")
    assert values == {
        "version": 1, "extents": 2, "pool": 3, "sequence": 7, "place": 8, "payload_bytes": 9,
        "root": header.root, "key": header.key, "parent": header.parent, "reserved": 0,
    }  # fmt: skip
    extent_row, sum_row = table("Record header")[-2:]
    assert extent_row[:2] == [str(end), "32 x n"]
    assert sum_row[0] == f"{end} + 32 x n"
    assert block[end : end + 32] == (0).to_bytes(8, "little") + (4096).to_bytes(8, "little") + b"a" * 16
    assert not any(block[end + 2 * 32 + int(sum_row[1]) :])
    assert f"at most {MAX_EXTENTS}" in section("Record header")


def test_the_blocks_of_a_volume() -> None:
    volume = bytes(range(16))
    super_block = ssd.pack_superblock(ssd.Superblock(volume, 1 << 26, 99))
    values = read("Superblock", super_block)
    assert values.pop("checksum")
    assert values == {
        "magic": magic("Superblock"), "version": ssd.FORMAT_VERSION, "reserved": 0, "volume_id": volume,
        "unit_bytes": 1 << 26, "sequence_ceiling": 99, "end": len(super_block),
    }  # fmt: skip

    segment = ssd.pack_segment(ssd.SegmentHeader(volume, 5, 6, 1 << 26, 8192, True))
    values = read("Segment header", segment)
    assert not any(segment[values.pop("end") :])
    assert values.pop("checksum")
    assert values == {
        "magic": magic("Segment header"), "version": ssd.FORMAT_VERSION, "flags": 1, "volume_id": volume,
        "first_unit": 5, "units": 6, "unit_bytes": 1 << 26, "stride_bytes": 8192,
    }  # fmt: skip

    stone = ssd.pack_tombstone(ssd.Tombstone(ssd.KIND_KEY, b"r" * 32, 11, 3, b"k" * 32))
    values = read("Tombstones", stone)
    assert values.pop("checksum")
    assert values == {
        "magic": magic("Tombstones"), "kind": 2, "pool": 3, "root": b"r" * 32, "key": b"k" * 32, "sequence": 11,
        "end": len(stone),
    }  # fmt: skip


def test_the_control_page() -> None:
    rows = table("Arena and control page")
    assert [row[:3] for row in rows] == [
        ["0", "8 x pages", "generation"],
        ["8 x pages", "4 x pages", "parts ready"],
    ]
    assert str(FAILED) in rows[1][3]
    assert control_size(2 << 20) == 12 * pages_of(2 << 20) + 2048 == 8192, "rounded up to 4 KiB"
