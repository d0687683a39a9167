"""What a setting is, and how each kind of value is read from text or TOML and checked. Pure; thread-safe.

Every parser takes what TOML, an environment variable or a flag gives, and raises Invalid with the accepted forms.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvstore.errors import Invalid
from kvstore.units import parse_size

PREFIX = "KVSTORE_"
NO_PATHS = "none"
"""How an empty list of paths is written in the environment or as a flag."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What is documented of one setting."""

    name: str
    unit: str
    range: str
    reason: str
    default: Any
    """REQUIRED where `Config.load` finds it, as `reason` says."""
    parse: Callable[[Any], Any]
    reload: bool
    """True where SIGHUP applies a change; otherwise a restart does."""
    many: bool

    @property
    def field(self) -> str:
        return self.name.replace(".", "_")

    @property
    def variable(self) -> str:
        return PREFIX + self.field.upper()

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")


def size_value(text: Any) -> int:
    return parse_size(text)


def share_value(text: Any) -> str:
    """A size or a share of something that is only known at start: checked, kept as text."""
    parse_size(text, whole_bytes=100)
    return str(text)


def auto_share_value(text: Any) -> str:
    return "auto" if text == "auto" else share_value(text)


def count_value(low: int, high: int) -> Callable[[Any], int]:
    def parse(text: Any) -> int:
        try:
            value = int(text) if not isinstance(text, (bool, float)) else None
        except (TypeError, ValueError):
            value = None
        if value is None or not low <= value <= high:
            raise Invalid(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


def seconds_value(low: float, high: float) -> Callable[[Any], float]:
    def parse(text: Any) -> float:
        try:
            value = float(text.removesuffix("s") if isinstance(text, str) else text)
        except (TypeError, ValueError):
            value = low - 1
        if isinstance(text, bool) or not low <= value <= high:
            raise Invalid(f"{text!r} is not a number of seconds from {low:g} to {high:g}")
        return value

    return parse


def choice_value(*words: str) -> Callable[[Any], str]:
    def parse(text: Any) -> str:
        if text not in words:
            raise Invalid(f"{text!r} is not one of: {', '.join(words)}{nearest(str(text), words)}")
        return str(text)

    return parse


def mode_value(text: Any) -> int:
    try:
        value = text if isinstance(text, int) and not isinstance(text, bool) else int(str(text).removeprefix("0o"), 8)
    except ValueError:
        value = -1
    if not 0 <= value <= 0o777:
        raise Invalid(f"{text!r} is not a file mode: write it like 0660 (in TOML: 0o660)")
    return value


def text_value(text: Any) -> str:
    if not isinstance(text, str) or "\0" in text:
        raise Invalid(f"{text!r} is not text")
    return text


def paths_value(text: Any) -> tuple[Path, ...]:
    words = text.split(":") if isinstance(text, str) else text
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise Invalid(f"{text!r} is not a list of folders")
    if list(words) in ([NO_PATHS], [""]):
        return ()
    paths = tuple(path_value(word) for word in words)
    if not all(words) or len(set(paths)) != len(paths):
        raise Invalid(f"{text!r} names a folder twice or has an empty name")
    return paths


def path_value(text: Any) -> Path:
    try:
        return Path(text_value(text)).expanduser().absolute()
    except RuntimeError as error:
        raise Invalid(f"{text!r}: that user has no home folder") from error


REQUIRED: Any = dataclasses.MISSING
"""Default of a setting that has none of its own: it depends on the user and the machine."""


def setting(
    default: Any, parse: Callable[[Any], Any], unit: str, range: str, reason: str, *, reload: bool = False
) -> Any:
    """A field of `Config` and its row in the table."""
    about = {
        "parse": parse, "unit": unit, "range": range, "reason": reason, "reload": reload, "default": default,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=about)


def nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` for an error's end, or nothing where no word is close."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
