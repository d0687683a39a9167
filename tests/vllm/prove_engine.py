"""Proof that a real vLLM engine runs here on CPU and that its own prefix cache works.

    .venv-vllm/bin/python tests/vllm/prove_engine.py [--model llama|hybrid] [--ranks 1|2]

Runs one prompt cold and once more on one engine: the second must have hit the engine's own prefix cache, and must give
the same greedy tokens and log-probabilities within 1e-4. A prompt that differs in its first token must not hit, and
must give other log-probabilities: a model that hardly looks back would prove nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""What every engine run on CPU needs, set before vLLM is imported; what is set already wins."""

BLOCK_TOKENS = 32
"""CPU attention takes multiples of 32 only."""


def engine_arguments(model: Path, ranks: int = 1, **overrides: Any) -> dict[str, Any]:
    """Arguments of `LLM` for a small, deterministic engine on CPU; `overrides` win."""
    return {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": 96,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "tensor_parallel_size": ranks,
        "distributed_executor_backend": "uni" if ranks == 1 else "mp",
        "disable_log_stats": False,
        "seed": 0,
    } | overrides


def prove(kind: str, ranks: int) -> dict[str, Any]:
    import tiny_models
    from vllm import LLM, SamplingParams

    started_s = time.monotonic()
    llm = LLM(**engine_arguments(getattr(tiny_models, kind)().folder(), ranks))
    ready_s = time.monotonic() - started_s
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=4, ignore_eos=True)
    prompt = tiny_models.prompt_token_ids(300)
    other = [(prompt[0] + 1) % 256, *prompt[1:]]

    def run(ids: list[int]) -> Any:
        return llm.generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)[0]

    cold, again, different = run(prompt), run(prompt), run(other)
    report = {
        "model": kind,
        "ranks": ranks,
        "start_s": round(ready_s, 1),
        "cached_tokens": [cold.num_cached_tokens, again.num_cached_tokens, different.num_cached_tokens],
        "tokens": list(cold.outputs[0].token_ids),
        "largest_difference": _largest_difference(cold, again),
        "difference_by_first_token": _largest_difference(cold, different),
    }
    assert cold.num_cached_tokens == 0 == different.num_cached_tokens, report
    assert again.num_cached_tokens == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, report
    assert list(cold.outputs[0].token_ids) == list(again.outputs[0].token_ids), report
    assert report["largest_difference"] <= 1e-4, report
    assert report["difference_by_first_token"] > 1e-3, report  # the oracle must see a wrong first token, 300 back
    return report


def _largest_difference(left: Any, right: Any) -> float:
    pairs = zip(left.outputs[0].logprobs, right.outputs[0].logprobs, strict=True)
    return max(abs(a[token].logprob - b[token].logprob) for a, b in pairs for token in a.keys() & b.keys())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["llama", "hybrid"], default="llama")
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps(prove(arguments.model, arguments.ranks)))


if __name__ == "__main__":
    main()
