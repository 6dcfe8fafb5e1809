"""A request's span, with the children that say where its time went."""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

import pytest

from samebit.rollout.integrations.http.service import Service
from samebit.rollout.integrations.http.serving import tracing_of
from samebit.rollout.integrations.http.settings import ServeSettings

from .served import NAME, Served
from .test_streams import LONG, ask

sdk = pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from samebit.rollout.integrations.http.tracing import Tracing  # noqa: E402

TRACE, PARENT = 0xABCDEF0123456789ABCDEF0123456789, 0x1234567890ABCDEF
BODY = {"prompt": [[1, 2, 3], [4]], "max_tokens": 5, "n": 2, "ignore_eos": True, "request_id": "one"}


async def ignore(_: dict[str, Any]) -> None:
    return


def spans_of(served: Served, body: dict[str, Any], *headers: tuple[bytes, bytes], **settings: Any) -> list[Any]:
    """Ask a service that is traced, and return its spans."""
    kept, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracing = Tracing(provider.get_tracer("test"), NAME)
    service = Service(served.service.worker, ServeSettings(**settings), NAME, served.service.tokenizer, tracing)
    asyncio.run(ask(service, body, ignore, *headers))
    return list(kept.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_span_with_its_stages_in_the_callers_trace(served: Served, stream: bool) -> None:
    header = (b"traceparent", f"00-{TRACE:032x}-{PARENT:016x}-01".encode())
    spans = spans_of(served, {**BODY, "stream": stream}, header)
    requests = [span for span in spans if span.name == "llm_request"]
    assert {span.context.trace_id for span in spans} == {TRACE}
    assert [span.parent.span_id for span in requests] == [PARENT, PARENT]
    assert [span.attributes["gen_ai.request.id"] for span in requests] == ["cmpl-one", "cmpl-one-1"]
    assert [span.attributes["gen_ai.usage.input_tokens"] for span in requests] == [3, 1]
    for span in requests:
        told = span.attributes
        assert told["gen_ai.usage.output_tokens"] == 10
        assert told["gen_ai.response.finish_reasons"] == ("length", "length")
        assert (told["gen_ai.request.model"], told["gen_ai.request.n"]) == (NAME, 2)
        children = [one for one in spans if one.parent.span_id == span.context.span_id]
        assert [one.name for one in children] == ["queue", "prefill", "decode"]
        assert children[0].start_time == span.start_time
        assert children[-1].end_time <= span.end_time
        for before, after in itertools.pairwise(children):
            assert before.start_time <= before.end_time == after.start_time <= after.end_time


def test_without_a_caller_each_request_begins_a_trace(served: Served) -> None:
    (request,) = (span for span in spans_of(served, {**BODY, "prompt": [1]}) if span.name == "llm_request")
    assert request.parent is None


def test_one_that_is_given_up_has_a_span_too(served: Served) -> None:
    (request,) = spans_of(served, LONG, request_seconds=0.1)
    assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing_of(None, NAME) is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint='http://x'.*pip install 'samebit\[otel\]'"):
        tracing_of("http://x", NAME)
