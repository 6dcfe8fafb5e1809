"""The HTTP clients of vLLM work against `samebit serve`: of its weight transfers, and of `vllm bench serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

import aiohttp
import requests
from transformers import AutoModelForCausalLM
from vllm.benchmarks.lib.endpoint_request_func import (
    ASYNC_REQUEST_FUNCS,
    RequestFuncInput,
    RequestFuncOutput,
)
from vllm.benchmarks.lib.ready_checker import wait_for_endpoint
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from samebit.kernels import bind, token_logprobs
from samebit.rollout.integrations.gloo_weights import GlooWeights

from ..http.served import NAME, Served, build_folder, serving

IDS = list(range(20))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(build_folder(tmp_path / "model"), "--control", "loopback") as one:
        yield one


def test_weights_through_the_client_of_vllms_trainers(served: Served, tmp_path: Path) -> None:
    """Weights come through the client of vLLM's trainers: what is sampled after the update has the bits of the model
    that was sent, and the version that was named.
    """
    other = bind(AutoModelForCausalLM.from_pretrained(build_folder(tmp_path / "other", seed=1), dtype=torch.float32))
    client = HTTPVLLMWeightSyncClient(served.control)
    assert isinstance(client, VLLMWeightSyncClient)
    weights = GlooWeights(client, part_bytes=10_000)
    weights.init_weight_transfer()
    weights.send_weights(other.named_parameters())
    assert served.service.worker.weight_version == 1
    asked = {"token_ids": IDS, "sampling_params": {"max_tokens": 8, "logprobs": 0, "ignore_eos": True}}
    (choice,) = served.post("/inference/v1/generate", asked).json()["choices"]
    expected = token_logprobs(other, torch.tensor([IDS + choice["token_ids"]]))[0, -8:].tolist()
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == expected
    client.shutdown_weight_transfer_engine()
    with pytest.raises(requests.HTTPError, match="409"):
        client.start_weight_update()


def test_nccl_and_pickles_are_refused(served: Served) -> None:
    client = HTTPVLLMWeightSyncClient(served.control)
    nccl = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "packed": True}
    with pytest.raises(requests.HTTPError, match="400"):
        client.init_weight_transfer_engine(nccl)
    with pytest.raises(requests.HTTPError, match="400"):
        client.update_weights({"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "ipc_handles": [{}]})


@pytest.mark.parametrize(
    ("backend", "path"),
    [("vllm", "/v1/completions"), ("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_the_requests_of_vllms_benchmark(served: Served, backend: str, path: str) -> None:
    asked = RequestFuncInput(
        prompt="2+3=", api_url=served.base + path, prompt_len=4, output_len=12, model=NAME, ignore_eos=True,
        extra_body={"temperature": 0.7, "top_k": 5}, request_id="bench-1",
    )  # fmt: skip

    async def run() -> RequestFuncOutput:
        async with aiohttp.ClientSession() as session:
            return await wait_for_endpoint(ASYNC_REQUEST_FUNCS[backend], asked, session)

    output = asyncio.run(run())
    assert output.success, output.error
    assert output.output_tokens == 12
    assert output.ttft > 0
