"""What this connector does not serve yet: refused at start, by name, so that nothing is ever served by half."""

from __future__ import annotations

from typing import Any

from kvstore.connectors.vllm.options import Options
from kvstore.errors import Invalid

SUPPORTED = ((0, 32), (0, 33))
"""vLLM versions (major, minor) whose hooks were read and run."""
HASH_ALGORITHM = "sha256_cbor"


def check_version(version: str) -> None:
    """Raises Invalid outside of the supported range."""
    head = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if head not in SUPPORTED:
        first, last = (".".join(map(str, edge)) for edge in (SUPPORTED[0], SUPPORTED[-1]))
        raise Invalid(f"kvstore's connector supports vLLM {first} to {last}; this is {version}")


def check_engine(config: Any, cache: Any, options: Options) -> None:
    """config: VllmConfig, cache: KVCacheConfig. Raises Invalid with one sentence for the first thing not served."""
    for what in (*_engine_gaps(config, options), *_cache_gaps(cache)):
        raise Invalid(f"kvstore's connector does not support {what}")
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm != HASH_ALGORITHM:
        raise Invalid(
            f"the block hashes of {algorithm!r} are not the same in every process: start vLLM with "
            f"--prefix-caching-hash-algo {HASH_ALGORITHM}"
        )


def _engine_gaps(config: Any, options: Options) -> list[str]:
    parallel = config.parallel_config
    model = config.model_config
    gaps = {
        f"KV caches on {_device(config)} yet, only on cpu": _device(config) != "cpu",
        "ranks on other nodes (nnodes > 1): its shared memory is this node's": getattr(parallel, "nnodes", 1) > 1,
        "the ray executor, whose ranks may be on other nodes": parallel.distributed_executor_backend == "ray",
        "pipeline parallelism yet": parallel.pipeline_parallel_size > 1,
        "data parallelism yet": parallel.data_parallel_size > 1,
        "prefill context parallelism yet": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "decode context parallelism yet": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "LoRA adapters yet": config.lora_config is not None,
        "speculative decoding yet": config.speculative_config is not None,
        "sleep mode yet (enable_sleep_mode)": bool(getattr(model, "enable_sleep_mode", False)),
        "encoder-decoder models": bool(getattr(model, "is_encoder_decoder", False)),
        "KV scales calculated at run time (calculate_kv_scales): they are not part of the checkpoint": bool(
            getattr(config.cache_config, "calculate_kv_scales", False)
        ),
        "layer-wise loading yet (layerwise)": options.layerwise,
        f"kv_role {config.kv_transfer_config.kv_role!r}, only 'kv_both'": config.kv_transfer_config.kv_role
        != "kv_both",
    }
    return [what for what, present in gaps.items() if present]


def _device(config: Any) -> str:
    return str(getattr(config.device_config, "device_type", "cpu") or "cpu")


def _cache_gaps(cache: Any) -> list[str]:
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        return [f"models with several KV cache groups yet ({kinds or 'none'})"]
    spec = groups[0].kv_cache_spec
    name = type(spec).__name__
    if name != "FullAttentionSpec":
        return [f"KV cache groups of the kind {name} yet, only FullAttentionSpec"]
    gaps = {
        "draft layers in a KV cache group": groups[0].is_eagle_group,
        "KV caches in host memory (host_resident)": groups[0].host_resident,
        "padded KV cache pages": spec.page_size_padded is not None,
        "KV cache layouts without a name": not cache.kv_cache_layout,
    }
    return [what for what, present in gaps.items() if present]
