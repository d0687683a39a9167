"""What is refused at start, what users may set, and what the weights' fingerprint sees; all without vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm.fingerprint import canonical, folder_fingerprint
from kvstore.connectors.vllm.identity import request_identity
from kvstore.connectors.vllm.limits import check_engine, check_version
from kvstore.connectors.vllm.options import Options, engine_options, request_options
from kvstore.errors import Invalid


class FullAttentionSpec(SimpleNamespace):
    """The name is what counts."""


class MambaSpec(SimpleNamespace): ...


class MLAAttentionSpec(SimpleNamespace): ...


def engine(path: str = "", value: Any = None) -> Any:
    """A configuration that is served, but for the field at `path`."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            nnodes=1, distributed_executor_backend="mp", pipeline_parallel_size=1, data_parallel_size=1,
            prefill_context_parallel_size=1, decode_context_parallel_size=1, tensor_parallel_size=1,
        ),
        model_config=SimpleNamespace(enable_sleep_mode=False, is_encoder_decoder=False),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor", calculate_kv_scales=False),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        lora_config=None,
        speculative_config=None,
    )  # fmt: skip
    if path:
        *parents, name = path.split(".")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        assert hasattr(target, name)
        setattr(target, name, value)
    return config


def group(kind: type = FullAttentionSpec, **fields: Any) -> Any:
    values = {"is_eagle_group": False, "host_resident": False} | fields
    return SimpleNamespace(kv_cache_spec=kind(page_size_padded=values.pop("padded", None)), **values)


def cache(*groups: Any, layout: str | None = "LBHNC") -> Any:
    return SimpleNamespace(kv_cache_groups=list(groups), kv_cache_layout=layout)


def test_a_plain_engine_is_served() -> None:
    check_engine(engine(), cache(group()), Options())


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("parallel_config.nnodes", 2, "other nodes"),
        ("parallel_config.distributed_executor_backend", "ray", "ray"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline"),
        ("parallel_config.data_parallel_size", 2, "data parallelism"),
        ("parallel_config.prefill_context_parallel_size", 2, "prefill context"),
        ("parallel_config.decode_context_parallel_size", 2, "decode context"),
        ("lora_config", object(), "LoRA"),
        ("speculative_config", object(), "speculative"),
        ("model_config.enable_sleep_mode", True, "sleep mode"),
        ("model_config.is_encoder_decoder", True, "encoder-decoder"),
        ("cache_config.calculate_kv_scales", True, "calculate_kv_scales"),
        ("cache_config.prefix_caching_hash_algo", "sha256", "--prefix-caching-hash-algo sha256_cbor"),
        ("cache_config.prefix_caching_hash_algo", "xxhash", "--prefix-caching-hash-algo sha256_cbor"),
        ("device_config.device_type", "cuda", "KV caches on cuda"),
        ("kv_transfer_config.kv_role", "kv_producer", "kv_producer"),
    ],
)
def test_engines_are_refused_by_name(path: str, value: Any, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        check_engine(engine(path, value), cache(group()), Options())


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        (cache(), r"several KV cache groups yet \(none\)"),
        (cache(group(), group(MambaSpec)), r"FullAttentionSpec, MambaSpec"),
        (cache(group(MambaSpec)), "of the kind MambaSpec"),
        (cache(group(MLAAttentionSpec)), "of the kind MLAAttentionSpec"),
        (cache(group(is_eagle_group=True)), "draft layers"),
        (cache(group(host_resident=True)), "host memory"),
        (cache(group(padded=4096)), "padded"),
        (cache(group(), layout=None), "without a name"),
    ],
)
def test_caches_are_refused_by_name(caches: Any, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        check_engine(engine(), caches, Options())


def test_layerwise_is_refused() -> None:
    with pytest.raises(Invalid, match="layer-wise"):
        check_engine(engine(), cache(group()), Options(layerwise=True))


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0+cpu", "0.32.1.dev3+g1234"])
def test_versions_that_are_supported(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "dev", ""])
def test_versions_that_are_not(version: str) -> None:
    with pytest.raises(Invalid, match=r"supports vLLM 0\.32 to 0\.33"):
        check_version(version)


def test_options_are_checked_by_name() -> None:
    assert engine_options({}) == Options()
    assert engine_options({"chunk_tokens": 64, "save": False}) == Options(chunk_tokens=64, save=False)
    for bad, words in (
        ({"chunktokens": 1}, "chunktokens"),
        ({"save": "no"}, "save"),
        ({"held_share": 0}, "held_share"),
    ):
        with pytest.raises(Invalid, match=words):
            engine_options(bad)
    assert not request_options(None).off
    assert not request_options({"other": {"x": 1}}).off
    assert request_options({"kvstore": {"off": True}}).off
    with pytest.raises(Invalid, match="ofF"):
        request_options({"kvstore": {"ofF": True}})


def test_salts_are_any_text_and_never_equal_to_none() -> None:
    identities = [request_identity(salt, "") for salt in (None, "", "a", "\0", "\ud800", "x" * 100_000)]
    assert len({identity.salt for identity in identities}) == len(identities)
    assert request_identity(None, "1") != request_identity(None, "2")


def weights(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(b"header" + bytes(1000))
    (folder / "model-2.safetensors").write_bytes(b"header" + bytes(999) + b"\1")
    (folder / "README.md").write_text("not weights")
    return folder


def test_the_fingerprint_sees_content_and_names_but_not_the_place(tmp_path: Path) -> None:
    first = weights(tmp_path / "a")
    second = weights(tmp_path / "b")
    expected = folder_fingerprint(first)
    assert folder_fingerprint(second) == expected
    (second / "README.md").write_text("changed")
    assert folder_fingerprint(second) == expected
    for change in (
        lambda folder: (folder / "model-1.safetensors").write_bytes(b"header" + bytes(999) + b"\2"),
        lambda folder: (folder / "model-1.safetensors").rename(folder / "model-3.safetensors"),
        lambda folder: (folder / "model-2.safetensors").unlink(),
        lambda folder: (folder / "more.bin").write_bytes(b""),
    ):
        shutil.rmtree(second)
        change(weights(second))
        assert folder_fingerprint(second) != expected


def test_a_hub_snapshot_is_known_by_the_names_of_its_blobs(tmp_path: Path) -> None:
    """Links to blobs named by their SHA-256: nothing is read, so a file of another content goes unseen on purpose."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (blobs / ("a" * 64)).write_bytes(b"1")
    (snapshot / "model.safetensors").symlink_to(blobs / ("a" * 64))
    first = folder_fingerprint(snapshot)
    (blobs / ("a" * 64)).write_bytes(b"2")
    assert folder_fingerprint(snapshot) == first
    (blobs / ("b" * 64)).write_bytes(b"1")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(blobs / ("b" * 64))
    assert folder_fingerprint(snapshot) != first


def test_folders_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="set weights_revision"):
        folder_fingerprint(tmp_path)


def test_settings_have_one_text() -> None:
    assert canonical({"b": 1, "a": {2, 1}}) == canonical({"a": {1, 2}, "b": 1})
    assert canonical({"a": 1}) != canonical({"a": "1"})
    assert canonical(Path("x")) != canonical("x")
