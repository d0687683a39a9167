"""Our counters in vLLM's clothes: its log line, and Prometheus. Imports vLLM.

Names are those that scheduler and workers count under (docs/vllm.md): load_tokens, loaded_bytes, save_refused_full ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

METRIC = "vllm:kvstore_events"
METRIC_TEXT = "What kvstore's connector did, by event; names that end in _bytes and _tokens count those."


class Stats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Sums by name since the last time that they were taken."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter, with the event's name as a label: new events need no new metric."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._events = metric_types[Counter](name=METRIC, documentation=METRIC_TEXT, labelnames=[*labelnames, "event"])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for event, count in transfer_stats_data.items():
            self._events.labels(*self.per_engine_labelvalues[engine_idx], event).inc(count)


def stats_of(counts: Mapping[str, int]) -> Stats | None:
    """None where nothing happened."""
    return Stats(data=dict(counts)) if counts else None
