"""Graphs change no bit on a GPU, and a step waits for the device once."""

import warnings

import pytest
import torch

from samebit.kernels import bind
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams

from ..exactness.families import make_model, token_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PROMPTS = token_ids(1, 2, 40, 64, 65, 130)
PARAMS = [SamplingParams(seed=seed, max_tokens=40, n=1 + seed % 3, ignore_eos=True) for seed in range(len(PROMPTS))]


def generated(name: str, dtype: torch.dtype, **changes: int | bool) -> list[RequestOutput]:
    config = RolloutConfig(device="cuda", max_num_seqs=8, max_model_len=256, num_blocks=64, **changes)
    with RolloutWorker(bind(make_model(name, dtype)).cuda(), config=config) as worker:
        return worker.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "NemotronH", "FalconH1", "Qwen3Moe", "GptOss"])
def test_graphs_change_no_bit(name: str, dtype: torch.dtype) -> None:
    """Samples have the same bits with graphs, and with decodes launched ahead (the default), as without both."""
    eager = generated(name, dtype, enforce_eager=True, async_scheduling=False)
    for budget in (16, 100, 2048):
        found = generated(name, dtype, max_num_batched_tokens=budget)
        for one, other in zip(found, eager, strict=True):
            assert [(s.token_ids, s.logprobs) for s in one.samples] == [
                (s.token_ids, s.logprobs) for s in other.samples
            ]


@pytest.mark.parametrize("name", ["Qwen3", "NemotronH", "Mamba2", "Qwen3Moe"])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_step_waits_for_the_device_once(name: str, async_scheduling: bool) -> None:
    config = RolloutConfig(
        device="cuda", max_num_seqs=8, max_model_len=256, num_blocks=64, async_scheduling=async_scheduling
    )
    shared = {"max_tokens": 100, "ignore_eos": True}
    params = [
        SamplingParams(**shared),
        SamplingParams(**shared, top_p=0.9, top_k=50, min_p=0.01),
        SamplingParams(**shared, logit_bias={5: 1.0}),
        SamplingParams(max_tokens=100, min_tokens=99),
    ]
    with RolloutWorker(bind(make_model(name, torch.bfloat16)).cuda(), config=config) as worker:
        for _ in range(3):  # compiles and records; the second one hits what the first has cached
            worker.generate(PROMPTS[:4], params)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            worker.generate(PROMPTS[:4], params)
        torch.cuda.set_sync_debug_mode("default")
        assert [str(warning.message) for warning in seen] == [], "the wait for the tokens is one for an event"
