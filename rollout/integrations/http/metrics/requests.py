"""Count requests, and how long they took.

Invariant: a request is observed once, when it has left the server, whatever ended it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from samebit.rollout.integrations.http.served import ServedHandle
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.sampling_params import SamplingParams

LABELS = ("model_name", "engine")
ENGINE = "0"
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
_WHOLE = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_SAMPLES = (1, 2, 5, 10, 20, 50, 100)


@dataclass
class Seen:
    """Takes the requests that have left."""

    metrics: RequestMetrics

    def ended(self, handles: Iterable[ServedHandle]) -> None:
        """Observe what these requests gave."""
        for handle in handles:
            self.metrics.observe(handle)


class RequestMetrics:
    """Holds the counters and histograms of one server, in a registry of their own."""

    def __init__(self, model: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model, ENGINE)
        lengths = _one_two_five(max_model_len)
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST)
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds", "Between the tokens of a stream, as they are sent.", _BETWEEN
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between the tokens of a request.", _BETWEEN
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)
        self._queued = self._histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", _WHOLE)
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", lengths)
        self._generated = self._histogram("vllm:request_generation_tokens", "Tokens of a request's samples.", lengths)
        self._n = self._histogram("vllm:request_params_n", "Samples asked for.", _SAMPLES)
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "The max_tokens asked for.", lengths)
        self._success = self._counter("vllm:request_success", "Samples that ended, by reason.", "finished_reason")
        self._failed = self._counter("samebit_answers_failed", "Requests of HTTP that ended with an error.")
        self._inside = Gauge(
            "samebit_requests_inside", "Requests of HTTP that have not been answered.", LABELS, registry=self.registry
        ).labels(*self._labels)
        self.syncs = self._counter("samebit_weight_syncs", "Updates of the weights.").labels(*self._labels)
        self.sync_seconds = self._counter("samebit_weight_sync_seconds", "Time of updates.").labels(*self._labels)
        self.sync_bytes = self._counter("samebit_weight_sync_bytes", "Bytes of updates.").labels(*self._labels)
        self.synced_at = time.time()

    @contextmanager
    def counted(self, params: SamplingParams, prompts: int) -> Iterator[Seen]:
        """Count requests for the length of the block."""
        self._inside.inc()
        for _ in range(prompts):
            self._n.observe(params.n)
            if params.max_tokens is not None:
                self._max_tokens.observe(params.max_tokens)
        try:
            yield Seen(self)
        finally:
            self._inside.dec()

    def between_tokens(self, seconds: float) -> None:
        """Observe the time between two tokens of a stream."""
        self._between.observe(seconds)

    def synced(self, seconds: float, moved: int) -> None:
        """Observe an update of the weights: its seconds, and the bytes that it moved."""
        self.syncs.inc()
        self.sync_seconds.inc(seconds)
        self.sync_bytes.inc(moved)
        self.synced_at = time.time()

    def observe(self, handle: ServedHandle) -> None:
        """Observe a request that has left the server."""
        if not handle.done:
            self._success.labels(*self._labels, "abort").inc()
            return
        try:
            output = handle.result(0)
        except Exception:  # boundary: its own caller has heard of it
            self._failed.labels(*self._labels).inc()
            return
        for sample in output.samples:
            self._success.labels(*self._labels, sample.finish_reason).inc()
        self._observe_times(output)
        self._prompt.observe(len(output.prompt_token_ids))
        self._generated.observe(sum(len(sample.token_ids) for sample in output.samples))

    def _observe_times(self, output: RequestOutput) -> None:
        times = {event.name: event.time for event in reversed(output.events)}  # the first of each
        added, ended = times["added"], output.events[-1].time
        if "scheduled" in times:
            self._queued.observe(times["scheduled"] - added)
        if "first_token" in times:
            self._first.observe(times["first_token"] - added)
            longest = max(len(sample.token_ids) for sample in output.samples)
            if longest > 1:
                self._per_token.observe((ended - times["first_token"]) / (longest - 1))
        self._whole.observe(ended - added)

    def _histogram(self, name: str, says: str, buckets: Iterable[float]) -> Histogram:
        whole = Histogram(name, says, LABELS, registry=self.registry, buckets=tuple(buckets))
        return whole.labels(*self._labels)

    def _counter(self, name: str, says: str, *labels: str) -> Counter:
        return Counter(name, says, (*LABELS, *labels), registry=self.registry)


def _one_two_five(most: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `most`."""
    found: list[float] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > most:
                return found or [1.0]
            found.append(digit * scale)
        scale *= 10
