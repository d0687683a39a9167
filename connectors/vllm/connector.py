"""vLLM's hooks, each one line of ours: the scheduler's to `Scheduler`, the workers' to `Worker`. Imports vLLM.

vLLM makes one object in the scheduler's process and one in each worker's, and calls each from one thread. Every hook
that an exception of ours could leave runs under the guard; the constructor may refuse, by name, what is not served.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import vllm.version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.client import Client
from kvstore.connectors.transfer import HostCopier, layer_pages
from kvstore.connectors.vllm.identity import base_namespace, cache_shape, chunk_geometry, with_hash_seed
from kvstore.connectors.vllm.limits import check_engine, check_version
from kvstore.connectors.vllm.options import engine_options
from kvstore.connectors.vllm.scheduler import Scheduler
from kvstore.connectors.vllm.stats import PromMetrics, Stats, stats_of
from kvstore.connectors.vllm.work import Setting, Work
from kvstore.connectors.vllm.worker import Worker
from kvstore.errors import Invalid

_log = logging.getLogger("vllm.kvstore")
SESSION_BYTES = 16


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Scheduler to workers, once a step."""

    work: Work


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler; None where there is nothing to say."""

    saved: dict[int, int] = field(default_factory=dict)
    """Save jobs that ended, and how many ranks have said so."""
    unready: bool = False
    """A rank does not reach the daemon now: what the scheduler promised could not be loaded."""

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        counts = Counter(self.saved)
        counts.update(other.saved)
        return WorkerMetadata(dict(counts), self.unready or other.unready)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Names below are vLLM's; what each must do is said there."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises Invalid with one sentence for whatever is not supported."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.version.__version__)
        options = engine_options(self._kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config, kv_cache_config, options)
        parallel = vllm_config.parallel_config
        shape = cache_shape(vllm_config, kv_cache_config)
        session = hashlib.sha256(str(self._kv_transfer_config.engine_id).encode()).digest()[:SESSION_BYTES]
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            geometry = chunk_geometry(shape, options)
            namespace = base_namespace(vllm_config, shape, geometry, options)

            def setting() -> Setting:
                seeded = with_hash_seed(namespace, kv_cache_utils.get_none_hash_seed())
                return Setting(seeded, geometry, shape.layers, shape.page_bytes)

            client = Client(
                options.socket_path, label="vllm scheduler", session=session, deadline_s=options.lookup_timeout_s
            )
            client.root(namespace)  # refuses what can never work, such as a part table above the limits
            self._scheduler = Scheduler(client, options, setting, parallel.tensor_parallel_size)
        else:
            client = Client(options.socket_path, label=f"vllm rank {parallel.rank}", session=session)
            self._worker = Worker(client, parallel.rank, shape.replicas)
        if not client.connected:
            _log.warning("no kvstore daemon yet, everything is computed: %s", client.last_error)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ---- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._ours.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._ours.guard.run("on_new_request", None, lambda: self._ours.on_new_request(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        none: int | None = 0
        tokens = self._ours.guard.run("look-up", none, lambda: self._ours.matched(request, num_computed_tokens))
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._ours.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        share = self._ours.guard.run("hit sources", 1.0, lambda: self._ours.resident_share(request))
        host = round(num_external_tokens * share)
        sources = {CacheHitSource.HOST: host, CacheHitSource.DISK: num_external_tokens - host}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        tables = scheduler_output.kv_connector_block_state

        def table(request_id: str) -> list[int]:
            groups = tables.get_block_ids(request_id) if tables is not None else None
            return groups[0] if groups else []

        preempted = scheduler_output.preempted_req_ids or ()
        return Metadata(self._ours.work(scheduler_output.num_scheduled_tokens, table, preempted))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        meta = meta if isinstance(meta, WorkerMetadata) else WorkerMetadata()
        loaded = connector_output.finished_recving or set()
        bad = connector_output.invalid_block_ids or set()
        processed = partial(self._ours.processed, loaded, bad, meta.saved, not meta.unready)
        self._ours.guard.run("update_connector_output", None, processed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._ours.guard.run("request_finished", None, lambda: self._ours.ended(request, block_ids))
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_push_work(self) -> bool:
        return self._ours.busy

    def reset_cache(self) -> bool:
        self._ours.reset()
        return True

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        names = [name for tensor in self._kv_cache_config.kv_cache_tensors for name in tensor.layers]
        tensors = [kv_caches[name] for name in names]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            raise Invalid(
                f"kvstore's connector does not support KV caches on {tensors[0].device.type} yet, only on cpu"
            )
        blocks = self._kv_cache_config.num_blocks
        pages = [layer_pages(t.data_ptr(), t.element_size(), t.shape, t.stride(), blocks) for t in tensors]
        self._rank.register(names, HostCopier(pages, tensors))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._rank.submit(self._get_connector_metadata().work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._rank.stop(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=self._rank.take_loaded())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._rank.take_bad_blocks()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        saved, ready = self._rank.take_saved(), self._rank.ready
        return WorkerMetadata(dict.fromkeys(saved, 1), not ready) if saved or not ready else None

    # ---- both

    def get_kv_connector_stats(self) -> Stats | None:
        return stats_of(self._scheduler.take_counts() if self._scheduler is not None else self._rank.take_counts())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return False

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    @property
    def _ours(self) -> Scheduler:
        assert self._scheduler is not None, "a hook of the scheduler was called in a worker"
        return self._scheduler

    @property
    def _rank(self) -> Worker:
        assert self._worker is not None, "a hook of the workers was called in the scheduler"
        return self._worker
