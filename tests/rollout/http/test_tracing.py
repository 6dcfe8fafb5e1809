"""A request has a span, with the children that say where its time went."""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import itertools
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from samebit.benchmarks.engines.http_servers import reserved_port
from samebit.rollout.integrations.http.service import Asked, Prompt, Service
from samebit.rollout.integrations.http.serving import tracing_of
from samebit.rollout.integrations.http.settings import ServeSettings
from samebit.rollout.sampling_params import SamplingParams

from ...patience import HANG, wait_until
from ..held_steps import held_steps
from ..step_gate import StepGate
from .served import NAME, Served, serving
from .test_streams import LONG, ask

sdk = pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: E402
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from samebit.rollout.integrations.http.tracing import Tracing  # noqa: E402

TRACE, PARENT = 0xABCDEF0123456789ABCDEF0123456789, 0x1234567890ABCDEF
BODY = {"prompt": [[1, 2, 3], [4]], "max_tokens": 5, "n": 2, "ignore_eos": True, "request_id": "one"}


async def ignore(_: dict[str, Any]) -> None:
    return


def spans_of(served: Served, body: dict[str, Any], *headers: tuple[bytes, bytes], **settings: Any) -> list[Any]:
    """Ask a service that is traced, and return its spans."""
    tracing, kept = keeping()
    service = Service(served.service.worker, ServeSettings(**settings), NAME, served.service.model.tokenizer, tracing)
    asyncio.run(ask(service, body, ignore, *headers))
    return list(kept.get_finished_spans())


def keeping() -> tuple[Tracing, InMemorySpanExporter]:
    """Return a tracing, and where it leaves its spans."""
    kept, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return Tracing(provider.get_tracer("test"), NAME), kept


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
    with held_steps(served.service.worker):
        (request,) = spans_of(served, LONG, request_seconds=0.1)
    assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_one_that_is_given_up_has_the_same_span_when_it_has_ended_meanwhile(
    make_worker: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is given up has the same span when it has ended meanwhile: else its stages would be there or not,
    by chance.
    """
    worker, runner = make_worker()
    gate = runner.gate = StepGate()
    tracing, kept = keeping()
    service, abort = Service(worker, ServeSettings(), NAME, None, tracing), worker.abort

    def abort_and_wait(ids: Iterable[str]) -> None:
        abort(ids)
        gate.release(100)
        wait_until(lambda: handles[0].done)

    monkeypatch.setattr(worker, "abort", abort_and_wait)
    with service.submitted(Asked(id="one", prompts=[Prompt([1])], params=SamplingParams(max_tokens=30))) as handles:
        gate.wait_for_a_step()
    (request,) = kept.get_finished_spans()
    assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing_of(None, NAME) is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint='http://x'.*pip install 'samebit\[otel\]'"):
        tracing_of("http://x", NAME)


class Collected(ThreadingHTTPServer):
    """Takes OTLP over HTTP, as a collector does, and keeps the spans of its protobuf messages."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taking)
        self.spans: list[Any] = []
        self.services: set[str] = set()


class _Taking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        plain = gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body
        assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        for one in ExportTraceServiceRequest.FromString(plain).resource_spans:
            named = {each.key: each.value.string_value for each in one.resource.attributes}
            self.server.services.add(named["service.name"])
            self.server.spans += [span for scope in one.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def collecting() -> Iterator[Collected]:
    with Collected() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def forwarding(target: str) -> Iterator[str]:
    """Run the collector `rotel`, which sends on what it takes; gives the address at which it takes traces."""
    agent = Path(importlib.util.find_spec("rotel").submodule_search_locations[0]) / "rotel-agent"
    with reserved_port() as one, reserved_port() as other:
        http, grpc = f"127.0.0.1:{one}", f"127.0.0.1:{other}"
        takes = ("--otlp-http-endpoint", http, "--otlp-grpc-endpoint", grpc)
        gives = ("--exporter", "otlp", "--otlp-exporter-endpoint", target, "--otlp-exporter-protocol", "http")
        process = subprocess.Popen([agent, "start", *takes, *gives], stdout=subprocess.DEVNULL)
        try:
            wait_until(lambda: process.poll() is not None or _listens(http))
            assert process.poll() is None
            yield f"http://{http}/v1/traces"
        finally:
            process.terminate()
            process.wait(HANG)


def _listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as tried:
        return tried.connect_ex((host, int(port))) == 0


@pytest.mark.parametrize("collector", [None, "rotel"])
def test_a_collector_takes_the_spans(collector: str | None, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector takes the spans over a socket, as protobuf; a collector of others reads and writes them anew."""
    if collector is not None:
        pytest.importorskip(collector, reason="the collector is not installed: pip install rotel")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with collecting() as target:
        address = f"http://127.0.0.1:{target.server_port}"
        if collector is None:
            ask_traced(served.folder, f"{address}/v1/traces")
            wait_until(lambda: len(target.spans) == 8)
        else:
            with forwarding(address) as between:
                ask_traced(served.folder, between)
                wait_until(lambda: len(target.spans) == 8)
    assert target.services == {"samebit"}
    assert {span.trace_id.hex() for span in target.spans} == {f"{TRACE:032x}"}
    requests = [span for span in target.spans if span.name == "llm_request"]
    for span, length in zip(
        sorted(requests, key=lambda span: len(told_of(span)["gen_ai.request.id"])), (3, 1), strict=True
    ):
        told = told_of(span)
        assert span.parent_span_id.hex() == f"{PARENT:016x}"
        assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (length, 10)
        children = [one for one in target.spans if one.parent_span_id == span.span_id]
        assert sorted(one.name for one in children) == ["decode", "prefill", "queue"]
        assert all(one.start_time_unix_nano <= one.end_time_unix_nano for one in children)


def ask_traced(folder: Path, endpoint: str) -> None:
    with serving(folder, "--otlp-traces-endpoint", endpoint, "--num-blocks", "64") as one:
        headers = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}
        assert one.post("/v1/completions", BODY, headers=headers).status_code == 200


def told_of(span: Any) -> dict[str, Any]:
    """Return a span's attributes, from their messages."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
