"""One real vLLM engine in a process of its own, told what to do in lines of JSON: run by `engine_process.py`.

Argument: a JSON object with `model` (folder), `connector` (kv_connector_extra_config), `policy`, `ranks`, `engine`
(further arguments of LLM). Commands come on stdin; answers go to the file descriptor `answers`, for stdout is vLLM's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import prove_engine


def page_digests(worker: Any, blocks: list[int]) -> list[str]:
    """Runs in a worker: a digest of the bytes of each block over all layers."""
    import hashlib

    import torch

    digests = []
    for block in blocks:
        pages = [
            cache[block].contiguous().view(torch.uint8).numpy().tobytes() for cache in worker.model_runner.kv_caches
        ]
        digests.append(hashlib.sha256(b"".join(pages)).hexdigest())
    return digests


def force_async_scheduling() -> None:
    """vLLM turns it off on CPU; its scheduler does not need that, only its benchmarks do."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: type, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if settings.get("async_scheduling"):
            force_async_scheduling()
        transfer = {}
        if settings["connector"] is not None:
            transfer["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KVStoreConnector",
                kv_role="kv_both",
                kv_load_failure_policy=settings.get("policy", "recompute"),
                kv_connector_extra_config=settings["connector"],
            )
        arguments = prove_engine.engine_arguments(Path(settings["model"]), settings.get("ranks", 1))
        self.llm = LLM(**(arguments | transfer | settings.get("engine", {})))
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.hashes: dict[str, list[bytes]] = {}
        connector = self.core.scheduler.connector
        if connector is not None:
            heard = connector.on_new_request

            def on_new_request(request: Any) -> None:
                self.hashes[tuple(request.prompt_token_ids)] = request.block_hashes
                heard(request)

            connector.on_new_request = on_new_request

    def generate(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        inputs = [
            {"prompt_token_ids": p["tokens"]} | ({"cache_salt": p["salt"]} if "salt" in p else {}) for p in prompts
        ]
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=p.get("count", 8),
                ignore_eos=True,
                logprobs=4,
                extra_args={"kv_transfer_params": p["params"]} if "params" in p else None,
            )
            for p in prompts
        ]
        started_s = time.monotonic()
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        seconds = time.monotonic() - started_s
        self.drain()
        return [
            {
                "cached": output.num_cached_tokens,
                "tokens": list(output.outputs[0].token_ids),
                "finish": output.outputs[0].finish_reason,
                "logprobs": [{str(t): p.logprob for t, p in step.items()} for step in output.outputs[0].logprobs or []],
                "seconds": seconds,
            }
            for output in outputs
        ]

    def drain(self, seconds: float = 10.0) -> bool:
        """Step until nothing is left to do, saves included."""
        deadline_s = time.monotonic() + seconds
        while self.core.scheduler.has_requests() and time.monotonic() < deadline_s:
            self.core.step_fn()
        return not self.core.scheduler.has_requests()

    def reset(self, connector: bool = False) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def blocks(self, tokens: list[int]) -> list[list[str]]:
        """Digests of the prompt's whole blocks that the engine has in its own cache now, one list a rank."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        ids = []
        for block_hash in self.hashes[tuple(tokens)][: len(tokens) // prove_engine.BLOCK_TOKENS]:
            found = pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            ids.append(found[0].block_id)
        return self.llm.collective_rpc(page_digests, args=(ids,))

    def counts(self) -> dict[str, int]:
        """Our events as Prometheus shows them."""
        return {
            metric.labels["event"]: int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:kvstore_events")
        }

    def scheduler(self) -> str:
        return type(self.core.scheduler).__name__

    def free_blocks(self) -> list[int]:
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return [pool.get_num_free_blocks(), pool.num_gpu_blocks - 1]

    def connected(self, seconds: float = 10.0) -> bool:
        """Whether scheduler and workers have a daemon within that time (workers of this process only)."""
        ours = self.core.scheduler.connector
        return all(client.wait_connected(seconds) for client in [ours._scheduler._client, self._worker()._client])

    def at_load(self, pid: int, number: int) -> None:
        """Send a signal to a process as soon as the next load is about to be handed to the worker's threads."""
        worker = self._worker()
        submit = worker.submit

        def submit_and_signal(work: Any) -> None:
            if work.loads:
                os.kill(pid, number)
                worker.submit = submit
            submit(work)

        worker.submit = submit_and_signal

    def _worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def start(self, name: str, tokens: list[int], count: int = 8) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling)

    def steps(self, count: int) -> bool:
        for _ in range(count):
            self.llm.llm_engine.step()
        return self.llm.llm_engine.has_unfinished_requests()

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])


def main() -> None:
    settings = json.loads(sys.argv[1])
    with os.fdopen(settings["answers"], "w", buffering=1) as answers:
        try:
            engine = Engine(settings)
        except Exception as error:  # the test asks for refusals too
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            raise
        answers.write(json.dumps({"result": "ready"}) + "\n")
        for line in sys.stdin:
            command = json.loads(line)
            result = getattr(engine, command["do"])(*command.get("args", []))
            answers.write(json.dumps({"result": result}) + "\n")


if __name__ == "__main__":
    for name, value in prove_engine.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    main()
