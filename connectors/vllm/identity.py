"""Who may share KV with this engine: the base namespace from vLLM's configuration, and what a request adds to it.

Only the scheduler's process works this out; the workers are told with each piece of work, so that there is one truth.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvstore.connectors.vllm.fingerprint import folder_fingerprint, settings_digest
from kvstore.connectors.vllm.options import Options
from kvstore.connectors.vllm.plan import Geometry, blocks_per_chunk
from kvstore.errors import Invalid
from kvstore.layout import PartRow, PoolSpec
from kvstore.namespace import BaseNamespace, Parallel, RequestIdentity

NOT_IDENTITY = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")
"""Of the model's settings: where it lies, who read it, and what has a field of its own."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One group of KVCacheConfig, as far as bytes are concerned."""

    layers: tuple[str, ...]
    page_bytes: int
    """Of one block of one layer on one rank."""
    block_tokens: int
    hashes_per_block: int
    dtype: str
    layout: str
    heads: int
    """KV heads of one rank."""
    shards: int
    """Ranks that hold different KV."""
    replicas: int
    """Consecutive ranks that hold the same."""


def cache_shape(config: Any, cache: Any) -> CacheShape:
    """config: VllmConfig, cache: KVCacheConfig of one full attention group."""
    group = cache.kv_cache_groups[0]
    spec = group.kv_cache_spec
    replicas = max(1, cache.kv_tp_replicas)
    hash_tokens = cache.hash_block_size or config.cache_config.block_size
    if spec.block_size % hash_tokens:
        raise Invalid(f"blocks of {spec.block_size} tokens are no multiple of the {hash_tokens} tokens of a hash")
    return CacheShape(
        layers=tuple(name for tensor in cache.kv_cache_tensors for name in tensor.layers),
        page_bytes=spec.page_size_bytes,
        block_tokens=spec.block_size,
        hashes_per_block=spec.block_size // hash_tokens,
        dtype=str(spec.dtype).removeprefix("torch."),
        layout=cache.kv_cache_layout,
        heads=spec.num_kv_heads,
        shards=config.parallel_config.tensor_parallel_size // replicas,
        replicas=replicas,
    )


def chunk_geometry(shape: CacheShape, options: Options) -> Geometry:
    """Raises Invalid for a chunk_tokens that does not fit the engine's blocks."""
    try:
        count = blocks_per_chunk(shape.block_tokens, shape.page_bytes * len(shape.layers), options.chunk_tokens)
    except ValueError as error:
        raise Invalid(str(error)) from error
    return Geometry(shape.block_tokens, count, shape.hashes_per_block)


def chunk_pool(shape: CacheShape, geometry: Geometry) -> PoolSpec:
    """One shard a rank, one part a layer."""
    part_bytes = geometry.blocks_per_chunk * shape.page_bytes
    rows = tuple(
        PartRow(
            shard=shard,
            offset_bytes=layer * part_bytes,
            length_bytes=part_bytes,
            first_layer=layer,
            last_layer=layer,
            tokens_per_block=shape.block_tokens,
            first_head=shard * shape.heads,
            last_head=(shard + 1) * shape.heads - 1,
            dtype=shape.dtype,
            layout=shape.layout,
        )
        for shard in range(shape.shards)
        for layer in range(len(shape.layers))
    )
    return PoolSpec(parts=rows, tokens_per_chunk=geometry.chunk_tokens)


def base_namespace(config: Any, shape: CacheShape, geometry: Geometry, options: Options) -> BaseNamespace:
    """Reads the weights. Raises Invalid where it cannot. The key scheme wants `with_hash_seed`, once that is known."""
    model, parallel = config.model_config, config.parallel_config
    text = _settings(model.hf_text_config)
    return BaseNamespace(
        model=",".join(model.architectures or ["unknown"]),
        weights=weights_fingerprint(model, config.load_config, options),
        pools=(chunk_pool(shape, geometry),),
        quantisation=f"{model.quantization or ''}/{settings_digest(_quantisation(model))}",
        kv_scales="checkpoint",
        kv_dtype=f"{config.cache_config.cache_dtype}/{shape.dtype}",
        rope=settings_digest({name: value for name, value in text.items() if "rope" in name or "position" in name}),
        sliding_window=str(config.model_config.get_sliding_window()),
        parallel=Parallel(tp=parallel.tensor_parallel_size),
        key_scheme=f"vllm-{config.cache_config.prefix_caching_hash_algo}",
        extra={
            "model settings": settings_digest(_settings(model.hf_config)),
            "text settings": settings_digest(text),
            "model dtype": str(model.dtype),
            "hash tokens": str(shape.block_tokens // shape.hashes_per_block),
            "hash lookahead": str(getattr(config, "num_hash_lookahead_tokens", 0)),
            "skipped layers": settings_digest(list(config.cache_config.kv_cache_dtype_skip_layers)),
        },
    )


def with_hash_seed(namespace: BaseNamespace, seed: str) -> BaseNamespace:
    """seed: what vLLM's hash of "no parent" was made from; known after the scheduler's connector has been made."""
    return msgspec.structs.replace(namespace, key_scheme=f"{namespace.key_scheme}-{seed}")


def request_identity(salt: str | None, epoch: str) -> RequestIdentity:
    """The salt goes in by its digest: any text is allowed, and operators' listings do not show it."""
    tag = "" if salt is None else "sha256:" + hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()
    return RequestIdentity(salt=tag, epoch=epoch)


def weights_fingerprint(model: Any, load: Any, options: Options) -> str:
    """model: ModelConfig, load: LoadConfig. Raises Invalid where nothing vouches for the weights."""
    if options.weights_revision:
        return "revision:" + options.weights_revision
    if load.load_format == "dummy":
        return f"dummy:{model.seed}"
    if getattr(model, "model_weights", ""):
        raise Invalid(f"the weights are at {model.model_weights}, which is no folder here: set weights_revision")
    folder = Path(model.model)
    if not folder.is_dir():
        folder = _snapshot(model, load)
    return "sha256:" + folder_fingerprint(folder)


def _snapshot(model: Any, load: Any) -> Path:
    """The folder of a model that vLLM has fetched from the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True)
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise Invalid(f"no local copy of the weights of {model.model} was found: set weights_revision") from error


def _settings(settings: Any) -> dict[str, Any]:
    """A transformers configuration after overrides, without what does not change KV."""
    values: dict[str, Any] = settings.to_dict()
    return {name: value for name, value in values.items() if name not in NOT_IDENTITY}


def _quantisation(model: Any) -> Any:
    found: Any = getattr(model.hf_config, "quantization_config", None)
    return found.to_dict() if hasattr(found, "to_dict") else found
