"""Strategies and small builders that several core tests share."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kvstore.layout import PartRow, PoolSpec
from kvstore.namespace import BaseNamespace, Parallel, RequestIdentity

FAST = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PAGE = 4096

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
filled = st.text("abcXYZ019-./é", min_size=1, max_size=12)
keys32 = st.binary(min_size=32, max_size=32)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def pools(draw: st.DrawFn, name: str = "full", max_shards: int = 4, max_parts: int = 8) -> PoolSpec:
    """A valid pool: rows in order, with gaps, some parts on page boundaries."""
    rows = []
    for shard in range(draw(st.integers(1, max_shards))):
        end = 0
        for layer in range(draw(st.integers(1, max_parts))):
            start = end + draw(st.sampled_from([0, 0, 0, 1, 100, -end % PAGE]))
            length = draw(st.sampled_from([1, 100, PAGE, 3 * PAGE, 300 * 1024, 512 * 1024, 700 * 1024]))
            rows.append(PartRow(shard, start, length, first_layer=layer, last_layer=layer))
            end = start + length
    return PoolSpec(tuple(rows), name)


rows = st.builds(
    PartRow,
    shard=st.just(0),
    offset_bytes=st.just(0),
    length_bytes=st.integers(1, 1 << 20),
    kind=st.sampled_from(["kv", "latent", "indexer", "state", "scale"]),
    first_layer=st.integers(0, 99),
    last_layer=st.integers(0, 99),
    tokens_per_block=st.integers(0, 256),
    first_head=st.integers(-1, 64),
    last_head=st.integers(-1, 64),
    dtype=filled,
    layout=filled,
)
simple_pools = st.builds(
    PoolSpec,
    parts=st.tuples(rows),
    name=filled,
    rule=st.sampled_from(["all", "trailing", "exact"]),
    window_chunks=st.integers(0, 9),
    tokens_per_chunk=st.integers(1, 512),
)
namespaces = st.builds(
    BaseNamespace,
    model=filled,
    weights=filled,
    pools=st.lists(simple_pools, min_size=1, max_size=2, unique_by=lambda pool: pool.name).map(tuple),
    quantisation=texts,
    kv_scales=texts,
    kv_dtype=texts,
    rope=texts,
    sliding_window=texts,
    parallel=st.builds(Parallel, *[st.integers(1, 8)] * 4),
    key_scheme=filled,
    format_version=st.integers(1, 3),
    extra=st.dictionaries(filled, texts, min_size=1, max_size=2),
)
identities = st.builds(RequestIdentity, lora=texts, salt=texts, tenant=texts, epoch=texts)
