"""Sizes as people write them: `64GiB`, `512 MB`, `30%`; and back."""

from __future__ import annotations

import re
from fractions import Fraction

from kvstore.errors import Invalid

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
PAGE_BYTES = 4 * KiB
"""Alignment of slots, O_DIRECT transfers and shared-memory pages."""

_UNITS = {
    "": 1, "B": 1,
    "K": KiB, "KIB": KiB, "KB": 10**3,
    "M": MiB, "MIB": MiB, "MB": 10**6,
    "G": GiB, "GIB": GiB, "GB": 10**9,
    "T": TiB, "TIB": TiB, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*")
_SHARE = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%\s*")


def parse_size(text: str | int, whole_bytes: int | None = None) -> int:
    """Bytes from `64GiB`, `1.5GB`, `4096` or, where `whole_bytes` is given, `30%` of it.

    Raises Invalid with one sentence that names the accepted forms.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise Invalid(f"size {text} is negative")
        return text
    share = _SHARE.fullmatch(str(text))
    if share is not None and whole_bytes is not None:
        percent = Fraction(share[1])
        if percent > 100:
            raise Invalid(f"size {text!r} is more than 100%")
        return int(whole_bytes * percent / 100)
    size = _SIZE.fullmatch(str(text))
    if size is None or size[2].upper() not in _UNITS:
        forms = "64GiB, 512MiB, 1.5GB or 4096" + (" or 30%" if whole_bytes is not None else "")
        raise Invalid(f"size {text!r} is not understood: write it like {forms}")
    return int(Fraction(size[1]) * _UNITS[size[2].upper()])


def format_size(size_bytes: float) -> str:
    """`1536` -> `1.5 KiB`: at most one decimal, binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return (
                f"{size_bytes:.0f} {unit}"
                if unit == "B" or size_bytes == int(size_bytes)
                else f"{size_bytes:.1f} {unit}"
            )
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step
