"""Count requests, and how long they took.

Invariant: a request is observed once, when it has left the server, whatever ended it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Set
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
    """Takes the requests that have left. n: the samples of each."""

    metrics: RequestMetrics
    n: int

    def ended(self, handles: Iterable[ServedHandle], given_up: Set[str]) -> None:
        """Observe the results of these requests; of those that are `given_up`, by their ids, that they were."""
        for handle in handles:
            if handle.request_id in given_up:
                self.metrics.abandoned(self.n)
            else:
                self.metrics.observe(handle)


class _Times:
    """Holds the histograms of how long requests took."""

    def __init__(self, histogram: Callable[[str, str, Iterable[float]], Histogram]) -> None:
        self.first = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST)
        self.between = histogram(
            "vllm:inter_token_latency_seconds", "Between the tokens of a stream, as they are sent.", _BETWEEN
        )
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between the tokens of a request.", _BETWEEN
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)
        self.queued = histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", _WHOLE)

    def observe(self, output: RequestOutput) -> None:
        """Observe the times of a request that has ended."""
        times = {event.name: event.time for event in reversed(output.events)}  # the first of each
        added, ended = times["added"], output.events[-1].time
        if "scheduled" in times:
            self.queued.observe(times["scheduled"] - added)
        if "first_token" in times:
            self.first.observe(times["first_token"] - added)
            longest = max(len(sample.token_ids) for sample in output.samples)
            if longest > 1:
                self.per_token.observe((ended - times["first_token"]) / (longest - 1))
        self.whole.observe(ended - added)


class _Syncs:
    """Counts updates of the weights. at: when the last one was."""

    def __init__(self, counter: Callable[[str, str], Counter], labels: tuple[str, ...]) -> None:
        self.count = counter("samebit_weight_syncs", "Updates of the weights.").labels(*labels)
        self.seconds = counter("samebit_weight_sync_seconds", "Time of updates.").labels(*labels)
        self.bytes = counter("samebit_weight_sync_bytes", "Bytes of updates.").labels(*labels)
        self.at = time.time()

    def add(self, seconds: float, moved: int) -> None:
        """Count an update, its seconds, and the bytes that it moved."""
        self.count.inc()
        self.seconds.inc(seconds)
        self.bytes.inc(moved)
        self.at = time.time()


class RequestMetrics:
    """Holds the counters and histograms of one server, in a registry of their own."""

    def __init__(self, model: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model, ENGINE)
        lengths = _one_two_five(max_model_len)
        self._times = _Times(self._histogram)
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", lengths)
        self._generated = self._histogram("vllm:request_generation_tokens", "Tokens of a request's samples.", lengths)
        self._n = self._histogram("vllm:request_params_n", "Samples asked for.", _SAMPLES)
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "The max_tokens asked for.", lengths)
        self._success = self._counter("vllm:request_success", "Samples that ended, by reason.", "finished_reason")
        self._failed = self._counter("samebit_answers_failed", "Requests of HTTP that ended with an error.")
        self._inside = Gauge(
            "samebit_requests_inside", "Requests of HTTP that have not been answered.", LABELS, registry=self.registry
        ).labels(*self._labels)
        self.syncs = _Syncs(self._counter, self._labels)

    @contextmanager
    def counted(self, params: SamplingParams, prompts: int) -> Iterator[Seen]:
        """Count requests for the length of the block."""
        self._inside.inc()
        for _ in range(prompts):
            self._n.observe(params.n)
            if params.max_tokens is not None:
                self._max_tokens.observe(params.max_tokens)
        try:
            yield Seen(self, params.n)
        finally:
            self._inside.dec()

    def between_tokens(self, seconds: float) -> None:
        """Observe the time between two tokens of a stream."""
        self._times.between.observe(seconds)

    def abandoned(self, n: int) -> None:
        """Count a request of `n` samples that has left the server before it had ended: all are aborted."""
        self._success.labels(*self._labels, "abort").inc(n)

    def observe(self, handle: ServedHandle) -> None:
        """Observe a request that has left the server when it had ended."""
        try:
            output = handle.result(0)
        except Exception:  # boundary: its own caller has heard of it
            self._failed.labels(*self._labels).inc()
            return
        for sample in output.samples:
            self._success.labels(*self._labels, sample.finish_reason).inc()
        self._times.observe(output)
        self._prompt.observe(len(output.prompt_token_ids))
        self._generated.observe(sum(len(sample.token_ids) for sample in output.samples))

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
