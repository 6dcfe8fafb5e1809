"""Read a worker's numbers when Prometheus asks for them: nothing is counted twice, and a step pays nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from samebit.rollout.control.worker_status import TAGS
from samebit.rollout.fleet.fleet import Fleet
from samebit.rollout.integrations.http.metrics.requests import ENGINE, LABELS
from samebit.rollout.integrations.http.served import numbers_of

if TYPE_CHECKING:
    from samebit.rollout.integrations.http.service import Service

GAUGES = frozenset(
    (
        "running", "waiting", "blocks_total", "blocks_free", "blocks_cached", "blocks_evictable", "weight_version",
        "states_used", "states_total", "draft_blocks_total", "draft_blocks_free",
    )
)  # fmt: skip
"""Names the numbers of `stats()` that are sizes of the moment; all others only grow."""


FLEET_GAUGES = frozenset(
    ("replicas", "replicas_open", "router_sessions", "router_groups", "router_shadow_blocks", "weight_version")
)
"""Names those of a fleet's own numbers."""

Numbers = dict[str, dict[str, float]]


class WorkerCollector(Collector):
    """Gives the numbers of `worker.stats()`: under vLLM's names, and all of them as `samebit_*`. The label `engine` is
    the replica; what a fleet has as a whole, and a server, is under "0"."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        worker = self._service.worker
        numbers = numbers_of(worker)
        yield from self._of_vllm(numbers)
        for name in next(iter(numbers.values()), {}):
            values = {engine: stats[name] for engine, stats in numbers.items() if name in stats}
            yield self._family(metric_name(name), f"{name} of worker.stats().", values, gauge=name in GAUGES)
        if isinstance(worker, Fleet):
            yield from self._of_fleet(worker)
        yield from self._of_server()

    def _of_vllm(self, numbers: Numbers) -> Iterable[Metric]:
        def gauge(name: str, says: str, value: Callable[[dict[str, float]], float]) -> Metric:
            return self._family(name, says, {engine: value(stats) for engine, stats in numbers.items()}, gauge=True)

        def counter(name: str, says: str, *parts: str) -> Metric:
            values = {engine: sum(stats[part] for part in parts) for engine, stats in numbers.items()}
            return self._family(name, says, values, gauge=False)

        found, looked_up = "prefill_tokens_skipped", ("prefill_tokens_computed", "prefill_tokens_skipped")
        yield gauge("vllm:num_requests_running", "Samples that run.", lambda stats: stats["running"])
        yield gauge("vllm:num_requests_waiting", "Samples that wait.", lambda stats: stats["waiting"])
        yield gauge("vllm:kv_cache_usage_perc", "Share of blocks in use, from 0 to 1.", _used)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", *looked_up)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found.", found)
        yield counter("vllm:prompt_tokens", "Prompt tokens, computed or found.", *looked_up)
        yield counter("vllm:prompt_tokens_cached", "Prompt tokens found.", found)
        yield counter("vllm:generation_tokens", "Tokens sampled.", "output_tokens")
        yield counter("vllm:num_preemptions", "Preempted samples.", "preemptions")
        yield counter("vllm:spec_decode_num_draft_tokens", "Tokens guessed ahead.", "draft_tokens")
        yield counter("vllm:spec_decode_num_accepted_tokens", "Guessed right.", "draft_tokens_accepted")

    def _of_fleet(self, fleet: Fleet) -> Iterable[Metric]:
        takes = {name: float(takes) for name, takes in fleet.replicas.items()}
        yield self._family("samebit_replica_open", "1 while this replica takes requests.", takes, gauge=True)
        for name, value in fleet.fleet_stats().items():
            says = f"{name} of fleet.stats()."
            yield self._family(f"samebit_fleet_{name}", says, {ENGINE: value}, gauge=name in FLEET_GAUGES)

    def _of_server(self) -> Iterable[Metric]:
        service = self._service
        age = time.time() - service.metrics.syncs.at
        inside, refused = service.admission.inside, service.admission.refused

        def own(name: str, says: str, value: float, *, gauge: bool = True) -> Metric:
            return self._family(name, says, {ENGINE: value}, gauge=gauge)

        yield own("samebit_weight_age_seconds", "Since the last update of the weights.", age)
        yield own("samebit_queue_samples", "Samples inside the queue's bound.", inside)
        yield own("samebit_queue_refused", "Requests answered 429.", refused, gauge=False)
        yield own("samebit_paused", "1 while generation is paused.", service.worker.paused)
        asleep = GaugeMetricFamily("samebit_sleeping", "1 while this memory is given back.", labels=(*LABELS, "tag"))
        for tag in TAGS:
            asleep.add_metric((service.model.name, ENGINE, tag), tag in service.worker.sleeping)
        yield asleep

    def _family(self, name: str, says: str, values: dict[str, float], *, gauge: bool) -> Metric:
        family = (GaugeMetricFamily if gauge else CounterMetricFamily)(name, says, labels=LABELS)
        for engine, value in values.items():
            family.add_metric((self._service.model.name, engine), value)
        return family


def metric_name(name: str) -> str:
    """Return the name for Prometheus of a number of `stats()`; `_total` is the end of counters alone there."""
    return f"samebit_{name.removesuffix('_total') if name in GAUGES else name}"


def _used(stats: dict[str, float]) -> float:
    return (stats["blocks_total"] - stats["blocks_free"]) / stats["blocks_total"]
