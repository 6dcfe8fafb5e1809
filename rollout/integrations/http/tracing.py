"""Trace requests with OpenTelemetry: a span each, with children for the time in the queue, of the prompt and of decode.

Attributes have the names of OpenTelemetry's conventions for generative AI, and vLLM's where it has more.

Invariants
----------
* A request has one span, written when it has left the server, whatever ended it.
* Times are those of the worker's own events, counted from when the front took the request: the clock of a replica on
  another node never mixes with the front's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

try:
    from opentelemetry import context, trace
    from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise ImportError(f"traces need OpenTelemetry: pip install 'samebit[otel]' ({error})") from error

from samebit.rollout.integrations.http.served import ServedHandle
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.sampling_params import SamplingParams

_CARRIED = (b"traceparent", b"tracestate")
_STAGES = (("queue", "added", "scheduled"), ("prefill", "scheduled", "first_token"), ("decode", "first_token", "ended"))


class Tracing:
    """Writes the spans of one server. tracer: where they go."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model
        self._carrier = TraceContextTextMapPropagator()

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return an application whose requests belong to the trace that their `traceparent` names (W3C)."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            found = {
                name.decode(): value.decode("latin-1") for name, value in scope.get("headers", ()) if name in _CARRIED
            }
            token = context.attach(self._carrier.extract(found, context.Context()))
            try:
                await app(scope, receive, send)
            finally:
                context.detach(token)

        return traced

    @contextmanager
    def requests(self, params: SamplingParams, handles: Sequence[ServedHandle], given_up: Set[str]) -> Iterator[None]:
        """Write a span for each of the handles that there are at the end of the block; of those that are `given_up` by
        then, by their ids, without what an abort makes of them sooner or later."""
        began = time.time_ns()
        try:
            yield
        finally:
            for handle in handles:
                output = None if handle.request_id in given_up else _output(handle)
                self._write(params, handle, output, began)

    def _write(
        self, params: SamplingParams, handle: ServedHandle, output: RequestOutput | Exception | None, began: int
    ) -> None:
        """Write the span of a request that has ended so; None: it was given up."""
        span = self._tracer.start_span("llm_request", kind=SpanKind.SERVER, start_time=began)
        ended = time.time_ns()
        span.set_attributes(
            {
                "gen_ai.request.id": handle.request_id,
                "gen_ai.request.model": params.adapter or self._model,
                "gen_ai.response.model": params.adapter or self._model,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.n": params.n,
            }
        )
        if params.max_tokens is not None:
            span.set_attribute("gen_ai.request.max_tokens", params.max_tokens)
        if isinstance(output, RequestOutput):
            span.set_attributes(_usage(output))
            self._stages(output, trace.set_span_in_context(span), began)
        elif output is not None:
            span.set_attribute("error.type", type(output).__name__)
            span.set_status(Status(StatusCode.ERROR, str(output)))
        else:
            span.set_attribute("gen_ai.response.finish_reasons", ["abort"])
        span.end(ended)

    def _stages(self, output: RequestOutput, parent: context.Context, began: int) -> None:
        """Write the children of a request that has ended."""
        times = _times(output)
        for name, start, end in _STAGES:
            if start in times and end in times:
                child = self._tracer.start_span(name, parent, start_time=began + _ns(times[start] - times["added"]))
                child.end(began + _ns(times[end] - times["added"]))


def tracing_to(endpoint: str, model: str) -> Tracing:
    """Return what sends spans to an OTLP collector over HTTP, in a thread of its own; `OTEL_*` set the rest.

    Raises:
        ImportError: OpenTelemetry's SDK or its exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ImportError(f"traces need OpenTelemetry's SDK: pip install 'samebit[otel]' ({error})") from error
    resource = Resource({"service.name": "samebit"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider.get_tracer("samebit"), model)


def _output(handle: ServedHandle) -> RequestOutput | Exception:
    """Return how a request has ended."""
    try:
        return handle.result(0)
    except Exception as error:  # boundary: its own caller has heard of it
        return error


def _times(output: RequestOutput) -> dict[str, float]:
    return {**{event.name: event.time for event in reversed(output.events)}, "ended": output.events[-1].time}


def _usage(output: RequestOutput) -> dict[str, int | float | list[str]]:
    times = _times(output)
    new, added = sum(len(sample.token_ids) for sample in output.samples), times["added"]
    found: dict[str, int | float | list[str]] = {
        "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.completion_tokens": new,
        "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.output_tokens": new,
        "gen_ai.usage.num_sequences": len(output.samples),
        "gen_ai.usage.cached_tokens": output.num_cached_tokens,
        "gen_ai.response.finish_reasons": [sample.finish_reason for sample in output.samples],
        "gen_ai.latency.e2e": times["ended"] - added,
    }
    if "scheduled" in times:
        found["gen_ai.latency.time_in_queue"] = times["scheduled"] - added
    if "first_token" in times:
        found["gen_ai.latency.time_to_first_token"] = times["first_token"] - added
    return found


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
