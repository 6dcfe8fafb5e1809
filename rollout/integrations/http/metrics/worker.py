"""Read a worker's numbers when Prometheus asks for them: nothing is counted twice, and a step pays nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from samebit.rollout.control.sleep import TAGS
from samebit.rollout.integrations.http.metrics.requests import ENGINE, LABELS

if TYPE_CHECKING:
    from samebit.rollout.integrations.http.service import Service

GAUGES = frozenset(
    (
        "running", "waiting", "blocks_total", "blocks_free", "blocks_cached", "blocks_evictable", "weight_version",
        "states_used", "states_total",
    )
)  # fmt: skip
"""Names the numbers of `stats()` that are sizes of the moment; all others only grow."""


class WorkerCollector(Collector):
    """Gives the numbers of `worker.stats()`: under vLLM's names, and all of them as `samebit_*`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._labels = (service.name, ENGINE)

    def collect(self) -> Iterable[Metric]:
        stats = self._service.worker.stats()
        computed, skipped = stats["prefill_tokens_computed"], stats["prefill_tokens_skipped"]
        used = (stats["blocks_total"] - stats["blocks_free"]) / stats["blocks_total"]
        yield self._gauge("vllm:num_requests_running", "Samples that run.", stats["running"])
        yield self._gauge("vllm:num_requests_waiting", "Samples that wait.", stats["waiting"])
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of blocks in use, from 0 to 1.", used)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", computed + skipped)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found.", skipped)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens, computed or found.", computed + skipped)
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens found.", skipped)
        yield self._counter("vllm:generation_tokens", "Tokens sampled.", stats["output_tokens"])
        yield self._counter("vllm:num_preemptions", "Preempted samples.", stats["preemptions"])
        for name, value in stats.items():
            family = self._gauge if name in GAUGES else self._counter
            yield family(f"samebit_{name}", f"{name} of worker.stats().", value)
        age = time.time() - self._service.metrics.synced_at
        yield self._gauge("samebit_weight_age_seconds", "Since the last update of the weights.", age)
        yield self._gauge("samebit_queue_samples", "Samples inside the queue's bound.", self._service.admission.inside)
        yield self._counter("samebit_queue_refused", "Requests answered 429.", self._service.admission.refused)
        yield self._gauge("samebit_paused", "1 while generation is paused.", self._service.worker.paused)
        asleep = GaugeMetricFamily("samebit_sleeping", "1 while this memory is given back.", labels=(*LABELS, "tag"))
        for tag in TAGS:
            asleep.add_metric((*self._labels, tag), tag in self._service.worker.sleeping)
        yield asleep

    def _gauge(self, name: str, says: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, says, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, says: str, value: float) -> Metric:
        family = CounterMetricFamily(name, says, labels=LABELS)
        family.add_metric(self._labels, value)
        return family
