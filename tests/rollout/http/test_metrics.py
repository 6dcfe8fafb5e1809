"""Prometheus reads what it should, and the dashboard asks for what is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import samebit.rollout.integrations.http.metrics as metrics_package
from samebit.benchmarks.engines.http_servers import reserved_port
from samebit.rollout.integrations.http.metrics.worker import metric_name
from samebit.rollout.integrations.http.service import Asked, Prompt, Service
from samebit.rollout.integrations.http.settings import ServeSettings
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

from ...patience import HANG, wait_until
from ..conftest import FakeRunner
from ..step_gate import StepGate
from .served import NAME, Served

MakeWorker = Callable[..., tuple[RolloutWorker, FakeRunner]]


def read(served: Served) -> dict[str, float]:
    """Return every sample by its name, summed over its labels. None is there twice: Prometheus would take neither."""
    text = served.http.get(f"{served.base}/metrics").text
    found: dict[str, float] = {}
    seen = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == NAME
            one = (sample.name, *sorted(sample.labels.items()))
            assert one not in seen
            seen.add(one)
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def needs(program: str) -> pytest.MarkDecorator:
    missing = shutil.which(program) is None
    return pytest.mark.skipif(missing, reason=f"{program} (of the Debian package prometheus) is not there")


def dashboard_queries() -> list[str]:
    dashboard = json.loads((Path(metrics_package.__file__).parent / "dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_numbers_are_the_workers(served: Served) -> None:
    before = read(served)
    asked = {"model": NAME, "prompt": [9] * 50, "n": 2, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    served.client.completions.create(**asked)
    list(served.client.completions.create(**asked, stream=True))
    after = read(served)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    stats = served.service.worker.stats()
    assert grown["vllm:generation_tokens_total"] == 24
    assert grown["vllm:request_success_total"] == 4
    assert grown["vllm:time_to_first_token_seconds_count"] == 2
    assert grown["vllm:request_generation_tokens_sum"] == 24
    assert grown["vllm:prefix_cache_hits_total"] == grown["samebit_prefill_tokens_skipped_total"] > 0
    assert after["samebit_blocks"] == stats["blocks_total"]
    assert after["vllm:num_requests_running"] == after["samebit_requests_inside"] == 0
    assert not [name for name in stats if not {metric_name(name), f"samebit_{name}_total"} & after.keys()]


@pytest.mark.parametrize("at_once", [False, True])
def test_samples_that_nobody_waits_for_any_more_are_counted_each(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Samples that nobody waits for any more are counted each, and nothing else of them, whether the abort has ended
    them by then or not.
    """
    worker, runner = make_worker()
    gate = runner.gate = StepGate()
    service, abort = Service(worker, ServeSettings(), NAME, None), worker.abort

    def abort_and_wait(ids: Iterable[str]) -> None:
        abort(ids)
        gate.release(100)
        wait_until(lambda: handles[0].done)

    if at_once:
        monkeypatch.setattr(worker, "abort", abort_and_wait)
    asked = Asked(id="mine", prompts=[Prompt([1, 2])], params=SamplingParams(n=8, max_tokens=30))
    with service.submitted(asked) as handles:
        gate.wait_for_a_step()
    labels, told = {"model_name": NAME, "engine": "0"}, service.metrics.registry.get_sample_value
    assert told("vllm:request_success_total", {**labels, "finished_reason": "abort"}) == 8
    assert told("vllm:e2e_request_latency_seconds_count", labels) == 0
    gate.release(100)


def test_time_passes_between_the_tokens_of_a_stream(served: Served) -> None:
    """Time passes between the tokens of a stream. Tokens that are read together have none between them, so a busy
    machine is asked again.
    """
    name = "vllm:inter_token_latency_seconds_count"
    before = read(served).get(name, 0.0)

    def asked() -> bool:
        list(served.client.completions.create(model=NAME, prompt="ab", max_tokens=20, stream=True))
        return read(served)[name] > before

    wait_until(asked)


def test_the_dashboard_asks_for_what_is_there(served: Served) -> None:
    queries = dashboard_queries()
    served.client.completions.create(model=NAME, prompt="a", max_tokens=1)
    names = set(read(served))
    asked = {name for query in queries for name in re.findall(r"\b(?:vllm:|samebit_)\w+", query)}
    assert len(asked) > 25
    assert not asked - names
    assert all(query.count("(") == query.count(")") for query in queries)


@needs("promtool")
def test_promtool_finds_nothing_but_vllms_colons(served: Served) -> None:
    """Promtool, which wants no colon in a name, finds nothing but those of vLLM's names, which dashboards want."""
    served.client.completions.create(model=NAME, prompt="a", max_tokens=2)
    text = served.http.get(f"{served.base}/metrics").text
    found = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, check=False, capture_output=True)
    said = (found.stdout + found.stderr).splitlines()
    assert said
    assert not [line for line in said if not re.fullmatch(r"vllm:\w+ metric names should not contain ':'", line)]


@needs("promtool")
def test_promql_understands_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(dashboard_queries())]
    groups = {"groups": [{"name": "dashboard", "rules": rules}]}
    file = tmp_path / "rules.json"  # JSON is YAML
    file.write_text(json.dumps(groups).replace("$__rate_interval", "5m"))
    subprocess.run(["promtool", "check", "rules", str(file)], check=True, capture_output=True)


@needs("prometheus")
def test_a_prometheus_scrapes_what_is_told(served: Served, tmp_path: Path) -> None:
    """A Prometheus scrapes what is told: each sample of /metrics is a series in its database, and the numbers are the
    worker's.
    """
    served.client.completions.create(model=NAME, prompt="a", max_tokens=3)
    job = {"job_name": "samebit", "static_configs": [{"targets": [served.base.removeprefix("http://")]}]}
    config = tmp_path / "prometheus.yml"
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}))
    with scraping(config, tmp_path) as ask:
        wait_until(lambda: ask("up") == {"up": 1.0})
        wait_until(lambda: ask("scrape_samples_post_metric_relabeling"))
        told = read(served)
        wait_until(lambda: ask('sum by (__name__) ({model_name="tiny"})').keys() == told.keys())
        stored = ask('sum by (__name__) ({model_name="tiny"})')
        samples = sum(1 for line in served.http.get(f"{served.base}/metrics").text.splitlines() if line[0] != "#")
        assert ask("scrape_samples_scraped") == {"scrape_samples_scraped": float(samples)}
    assert stored["samebit_output_tokens_total"] == told["samebit_output_tokens_total"] > 0
    assert stored["vllm:generation_tokens_total"] == told["vllm:generation_tokens_total"]


@contextmanager
def scraping(config: Path, folder: Path) -> Iterator[Callable[[str], dict[str, float]]]:
    """Run a Prometheus for the length of the block; gives a function that asks it, and has the values by name."""

    def ask(query: str) -> dict[str, float]:
        assert process.poll() is None
        try:
            answer = httpx.get(f"http://{address}/api/v1/query", params={"query": query})
        except httpx.TransportError:  # it starts
            return {}
        if answer.status_code != httpx.codes.OK:
            return {}
        return {one["metric"]["__name__"]: float(one["value"][1]) for one in answer.json()["data"]["result"]}

    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        flags = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}")
        process = subprocess.Popen(["prometheus", *flags], stderr=subprocess.DEVNULL)
        try:
            yield ask
        finally:
            process.terminate()
            process.wait(HANG)
