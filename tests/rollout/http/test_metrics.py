"""What Prometheus reads, and whether the dashboard asks for what is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import samebit.rollout.integrations.http.metrics as metrics_package

from ...patience import wait_until
from .served import NAME, Served


def read(served: Served) -> dict[str, float]:
    """Every sample by its name, summed over its labels."""
    text = served.http.get(f"{served.base}/metrics").text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == NAME
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


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
    assert after["samebit_blocks_total"] == stats["blocks_total"]
    assert after["vllm:num_requests_running"] == after["samebit_requests_inside"] == 0
    assert not [name for name in stats if f"samebit_{name}" not in after and f"samebit_{name}_total" not in after]


def test_time_passes_between_the_tokens_of_a_stream(served: Served) -> None:
    """Tokens that are read together have none between them, so a busy machine is asked again."""
    name = "vllm:inter_token_latency_seconds_count"
    before = read(served).get(name, 0.0)

    def asked() -> bool:
        list(served.client.completions.create(model=NAME, prompt="ab", max_tokens=20, stream=True))
        return read(served)[name] > before

    wait_until(asked)


def test_the_dashboard_asks_for_what_is_there(served: Served) -> None:
    dashboard = json.loads((Path(metrics_package.__file__).parent / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    served.client.completions.create(model=NAME, prompt="a", max_tokens=1)
    names = set(read(served))
    asked = {name for query in queries for name in re.findall(r"\b(?:vllm:|samebit_)\w+", query)}
    assert len(asked) > 25
    assert not asked - names
    assert all(query.count("(") == query.count(")") for query in queries)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (of the Debian package prometheus) is not there")
def test_prometheus_reads_them(served: Served) -> None:
    text = served.http.get(f"{served.base}/metrics").text
    subprocess.run(["promtool", "check", "metrics"], input=text, text=True, check=True, capture_output=True)
