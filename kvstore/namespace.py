"""Identity: what must be equal for two engines to share KV. Change any one field and everything misses.

`BaseNamespace` names the model and the bytes' shape, `RequestIdentity` what varies by request; the SHA-256 of both is
the `root`. Digests run over a canonical encoding (every value tagged by field name and type and length-prefixed), so no
two different identities encode alike: a LoRA hash equal to a salt string cannot collide. `extra` carries fields that
this version does not know: they are digested, never ignored. Pure; thread-safe.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from kvstore.errors import Invalid
from kvstore.keys import KEY_SCHEME
from kvstore.layout import PoolSpec, slot_layout

FORMAT_VERSION = 1
"""Of the bytes inside a chunk as this project lays them out; part of every base namespace."""
MAX_TEXT_BYTES = 4096
MAX_EXTRA = 64
MAX_POOLS = 32


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the parallel groups; the rank is the shard and not part of the namespace."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dcp: int = 1


class BaseNamespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one engine configuration shares among its requests."""

    model: str
    weights: str
    """Fingerprint over config and weight contents, or a revision that the user vouches for."""
    pools: tuple[PoolSpec, ...]
    quantisation: str = ""
    kv_scales: str = ""
    kv_dtype: str = ""
    rope: str = ""
    """Rope settings after overrides, as canonical text."""
    sliding_window: str = ""
    parallel: Parallel = Parallel()
    key_scheme: str = KEY_SCHEME
    format_version: int = FORMAT_VERSION
    extra: dict[str, str] = {}


class RequestIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What varies by request. `lora` is a hash of the adapter's content, never its name or path."""

    lora: str = ""
    salt: str = ""
    tenant: str = ""
    epoch: str = ""
    """The weights version, else a random token shared by the ranks of one engine; never a counter."""


def check_namespace(namespace: BaseNamespace) -> None:
    """Raises Invalid with one sentence: a field empty, mistyped, too long or with NUL, or a wrong part table."""
    _check_types("namespace", namespace)
    if not namespace.model or not namespace.weights:
        raise Invalid("a namespace needs `model` and `weights`: without both, other weights' KV could be served")
    if not 1 <= len(namespace.pools) <= MAX_POOLS:
        raise Invalid(f"a namespace has 1 to {MAX_POOLS} pools, not {len(namespace.pools)}")
    if len({pool.name for pool in namespace.pools}) != len(namespace.pools):
        raise Invalid("two pools of one namespace have the same name")
    if len(namespace.extra) > MAX_EXTRA:
        raise Invalid(f"a namespace has at most {MAX_EXTRA} extra fields, not {len(namespace.extra)}")
    _check_texts("namespace", msgspec.to_builtins(namespace))
    for pool in namespace.pools:
        slot_layout(pool)


def check_identity(identity: RequestIdentity) -> None:
    """Raises Invalid where a field is of a wrong type, too long or holds NUL."""
    _check_types("request identity", identity)
    _check_texts("request identity", msgspec.to_builtins(identity))


def base_digest(namespace: BaseNamespace) -> bytes:
    """32 bytes over every field, nested part tables included."""
    return hashlib.sha256(b"kvstore-base\0" + _canonical(msgspec.to_builtins(namespace))).digest()


def root_digest(namespace: BaseNamespace, identity: RequestIdentity | None = None) -> bytes:
    """32 bytes over the base namespace and the request's identity: the name under which chunks are kept."""
    request = _canonical(msgspec.to_builtins(identity or RequestIdentity()))
    return hashlib.sha256(b"kvstore-root\0" + base_digest(namespace) + request).digest()


def _check_types(what: str, value: BaseNamespace | RequestIdentity) -> None:
    """Structs made in Python are not checked on construction: a `None` or `1.5` would only fail in the digest."""
    try:
        msgspec.convert(msgspec.to_builtins(value), type(value))
    except (msgspec.ValidationError, TypeError) as error:
        raise Invalid(f"{what}: {error}") from error


def _check_texts(what: str, value: object, field: str = "") -> None:
    if isinstance(value, str):
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > MAX_TEXT_BYTES:
            raise Invalid(f"{what}: field {field!r} has {size} bytes, allowed are {MAX_TEXT_BYTES}")
        if "\0" in value or any(0xD800 <= ord(c) <= 0xDFFF for c in value):
            raise Invalid(f"{what}: field {field!r} holds NUL or broken Unicode")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_texts(what, name, field)
            _check_texts(what, item, name)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_texts(what, item, field)


def _canonical(value: object) -> bytes:
    """Type tag, length, content: injective, independent of field order."""
    if isinstance(value, dict):
        body = b"".join(_canonical(name) + _canonical(value[name]) for name in sorted(value))
        tag = b"d"
    elif isinstance(value, (list, tuple)):
        body = b"".join(map(_canonical, value))
        tag = b"l"
    elif isinstance(value, str):
        tag, body = b"s", value.encode()
    elif isinstance(value, int):
        tag, body = b"i", str(int(value)).encode()
    else:
        raise TypeError(f"no canonical form for {type(value).__name__}")
    return tag + struct.pack("<Q", len(body)) + body
