"""Identity: any one field changes the root, nothing collides, the encoding is the documented one."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from core_strategies import FAST, identities, namespaces
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Invalid
from kvstore.layout import PartRow, PoolSpec, one_part_pool
from kvstore.namespace import (
    MAX_EXTRA,
    MAX_TEXT_BYTES,
    BaseNamespace,
    Parallel,
    RequestIdentity,
    base_digest,
    check_identity,
    check_namespace,
    root_digest,
)

PLAIN = BaseNamespace("model", "weights", (one_part_pool(4096),))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every text and number in a tree."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from leaves(item, (*path, number))
    else:
        yield path


CHOICES = {"kind": ["kv", "latent", "indexer", "state", "scale"], "rule": ["all", "trailing", "exact"]}


def changed(value: Any, path: tuple[Any, ...], name: Any = None) -> Any:
    """A copy of the tree in which the leaf at `path` is another one."""
    if not path:
        if name in CHOICES:
            return CHOICES[name][CHOICES[name].index(value) - 1]
        return value + 1 if isinstance(value, int) else value + "~"
    step, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {field: changed(item, rest, step) if field == step else item for field, item in value.items()}
    return [changed(item, rest, step) if number == step else item for number, item in enumerate(value)]


def field_names(kind: type) -> set[str]:
    return {field.name for field in msgspec.structs.fields(kind)}


@given(namespaces, identities)
@FAST
def test_changing_any_one_field_changes_the_root(namespace: BaseNamespace, identity: RequestIdentity) -> None:
    """Every leaf of every struct, part-table rows included, in turn; no two of the results are equal either."""
    tree = msgspec.to_builtins(namespace)
    roots = [root_digest(namespace, identity)]
    seen: set[Any] = set()
    for path in leaves(tree):
        seen.update(path)
        roots.append(root_digest(msgspec.convert(changed(tree, path), BaseNamespace), identity))
    for path in leaves(msgspec.to_builtins(identity)):
        other = msgspec.convert(changed(msgspec.to_builtins(identity), path), RequestIdentity)
        roots.append(root_digest(namespace, other))
    assert len(set(roots)) == len(roots)
    for kind in (BaseNamespace, PoolSpec, PartRow, Parallel):
        assert field_names(kind) <= seen, "a field that has no leaf here is not tested"


def test_each_identity_field_counts_and_none_stands_for_another() -> None:
    """A LoRA hash equal to a salt's text, and so on for all pairs."""
    names = sorted(field_names(RequestIdentity))
    roots = {root_digest(PLAIN, RequestIdentity(**{name: "same text"})) for name in names}
    roots |= {root_digest(PLAIN), root_digest(PLAIN, RequestIdentity("same text", "same text"))}
    assert len(roots) == len(names) + 2
    assert root_digest(PLAIN) == root_digest(PLAIN, RequestIdentity())


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
@FAST
def test_texts_never_run_into_each_other(a: str, b: str, c: str, d: str) -> None:
    one = RequestIdentity(lora=a + b, salt=c + d)
    two = RequestIdentity(lora=a, salt=b + c + d)
    try:
        same = root_digest(PLAIN, one) == root_digest(PLAIN, two)
    except UnicodeEncodeError:
        return  # broken Unicode, which check_identity refuses
    assert same == (one == two)


def test_pools_and_extras_count_with_name_number_and_order() -> None:
    a, b = one_part_pool(4096, name="a"), one_part_pool(4096, name="b")
    variants = [
        PLAIN,
        BaseNamespace("model", "weights", (a,)),
        BaseNamespace("model", "weights", (a, b)),
        BaseNamespace("model", "weights", (b, a)),
        BaseNamespace("model", "weights", PLAIN.pools, extra={"x": "1"}),
        BaseNamespace("model", "weights", PLAIN.pools, extra={"x": "2"}),
        BaseNamespace("model", "weights", PLAIN.pools, extra={"y": "1"}),
        BaseNamespace("model", "weights", PLAIN.pools, extra={"x": "1", "y": "1"}),
        BaseNamespace("model", "weights", PLAIN.pools, extra={"salt": "1"}),
        BaseNamespace("model", "weights", PLAIN.pools, extra={"model": "model"}),
        BaseNamespace("modelweights", "", PLAIN.pools),
    ]
    assert len({base_digest(namespace) for namespace in variants}) == len(variants)
    one = BaseNamespace("m", "w", PLAIN.pools, extra={"x": "1", "y": "2"})
    two = BaseNamespace("m", "w", PLAIN.pools, extra={"y": "2", "x": "1"})
    assert base_digest(one) == base_digest(two), "the order in which extras were written down is no identity"


def documented_encoding(value: Any) -> bytes:
    """docs/formats.md, read anew: tag, u64-LE length, content; maps sorted by name, name then value."""
    if isinstance(value, str):
        tag, body = b"s", value.encode("utf-8")
    elif isinstance(value, int):
        tag, body = b"i", b"%d" % value
    elif isinstance(value, dict):
        tag, body = b"d", b"".join(documented_encoding(n) + documented_encoding(value[n]) for n in sorted(value))
    else:
        tag, body = b"l", b"".join(documented_encoding(item) for item in value)
    return tag + struct.pack("<Q", len(body)) + body


@given(namespaces, identities)
@FAST
def test_digests_are_the_documented_ones(namespace: BaseNamespace, identity: RequestIdentity) -> None:
    base = hashlib.sha256(b"kvstore-base\0" + documented_encoding(msgspec.to_builtins(namespace))).digest()
    root = hashlib.sha256(b"kvstore-root\0" + base + documented_encoding(msgspec.to_builtins(identity))).digest()
    assert (base_digest(namespace), root_digest(namespace, identity)) == (base, root)


def test_a_root_never_changes_between_versions() -> None:
    """What is on disk under this root must be found again: a change here loses every user's cache."""
    identity = RequestIdentity("lora", "salt", "tenant", "epoch")
    assert root_digest(PLAIN, identity).hex() == "0426e56f746e52133149e777afc86eb52ae544bbf1084277fb8a87fd8fc2ecd5"


trees = st.recursive(
    st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(trees, trees)
@FAST
def test_the_encoding_is_injective(one: Any, two: Any) -> None:
    assert (documented_encoding(one) == documented_encoding(two)) == (one == two)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model": ""}, "needs `model`"),
        ({"weights": ""}, "needs `model`"),
        ({"pools": ()}, "1 to 32 pools"),
        ({"pools": PLAIN.pools * 33}, "1 to 32 pools"),
        ({"pools": PLAIN.pools * 2}, "same name"),
        ({"pools": (PoolSpec((PartRow(0, 0, 0),)),)}, "not possible"),
        ({"extra": {str(n): "" for n in range(MAX_EXTRA + 1)}}, "at most 64 extra"),
        ({"model": "x" * (MAX_TEXT_BYTES + 1)}, "'model' has 4097 bytes"),
        ({"rope": "é" * (MAX_TEXT_BYTES // 2 + 1)}, "'rope' has"),
        ({"rope": "a\0b"}, "NUL"),
        ({"extra": {"a": "\0"}}, "NUL"),
        ({"extra": {"\0": "a"}}, "NUL"),
        ({"kv_dtype": "\ud800"}, "broken Unicode"),
        ({"pools": (one_part_pool(1, name="\ud800"),)}, "broken Unicode"),
        ({"model": None}, "Expected `str`"),
        ({"format_version": 1.5}, "Expected `int`"),
        ({"format_version": True}, "Expected `int`"),
        ({"parallel": Parallel(tp="2")}, "Expected `int`"),  # type: ignore[arg-type]
        ({"pools": (PoolSpec((PartRow(0, 0, 8, kind="other"),)),)}, "Invalid enum value"),  # type: ignore[arg-type]
        ({"extra": {"a": object()}}, "object"),
    ],
)
def test_wrong_namespaces_are_invalid_in_one_sentence(fields: dict[str, Any], why: str) -> None:
    """Regression: wrong types made in Python passed the check and were a TypeError, or a digest of `None`, later on."""
    with pytest.raises(Invalid, match=why) as caught:
        check_namespace(msgspec.structs.replace(PLAIN, **fields))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fields", [{"lora": "\0"}, {"salt": "x" * 4097}, {"epoch": "\udfff"}, {"tenant": 5}])
def test_wrong_identities_are_invalid(fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        check_identity(RequestIdentity(**fields))


@given(namespaces, identities)
@FAST
def test_good_ones_pass(namespace: BaseNamespace, identity: RequestIdentity) -> None:
    check_namespace(namespace)
    check_identity(identity)
