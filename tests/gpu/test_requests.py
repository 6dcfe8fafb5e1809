"""Every parameter of a request works on a GPU, all of them in one batch, with graphs and without."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from samebit.kernels import bind
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams

from ..exactness.families import make_model, token_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
PROMPTS = token_ids(1, 40, 65, 12, 130, 7, 9, 30, 64, 5)
PARAMS = [
    SamplingParams(seed=1, max_tokens=20, logprobs=3, n=3),
    SamplingParams(seed=2, max_tokens=20, prompt_logprobs=4),
    SamplingParams(seed=3, max_tokens=20, logprobs=0, temperature=0.0, prompt_logprobs=0),
    SamplingParams(seed=4, max_tokens=20, logit_bias={5: 4.0, 9: -100.0}, temperature=0.7),
    SamplingParams(seed=5, max_tokens=20, presence_penalty=0.5, frequency_penalty=0.3, n=2),
    SamplingParams(seed=6, max_tokens=20, repetition_penalty=1.3),
    SamplingParams(seed=7, max_tokens=20, min_tokens=15, stop_token_ids=tuple(range(0, 100, 3))),
    SamplingParams(seed=8, max_tokens=20, top_k=5, top_p=0.8, min_p=0.05, temperature=1.5),
    SamplingParams(max_tokens=20, ignore_eos=True, return_routed_experts=True),
    SamplingParams(seed=9, max_tokens=1, logprobs=200),
]


def generated(enforce_eager: bool, **changes: int) -> list[RequestOutput]:
    config = RolloutConfig(
        device=DEVICE, max_num_seqs=16, max_model_len=256, num_blocks=64, enforce_eager=enforce_eager, **changes
    )
    with RolloutWorker(bind(make_model("Qwen3Moe", torch.bfloat16)).to(DEVICE), config=config) as worker:
        return worker.generate(PROMPTS, PARAMS)


def test_no_parameter_minds_what_it_is_computed_with() -> None:
    expected = generated(enforce_eager=True)
    for eager, budget in ((False, 2048), (False, 24), (True, 24)):
        for one, other, asked in zip(generated(eager, max_num_batched_tokens=budget), expected, PARAMS, strict=True):
            assert one.prompt_logprobs == other.prompt_logprobs
            assert one.prompt_top_logprobs == other.prompt_top_logprobs
            for sample, same in zip(one.samples, other.samples, strict=True):
                for field in ("token_ids", "logprobs", "raw_logprobs", "top_logprobs", "finish_reason", "stop_reason"):
                    assert getattr(sample, field) == getattr(same, field), (field, asked)
                assert (sample.routed_experts is None) == (not asked.return_routed_experts)
                assert sample.routed_experts is None or np.array_equal(sample.routed_experts, same.routed_experts)
    first = expected[0].samples[0]
    for token, logprob, top in zip(first.token_ids, first.logprobs, first.top_logprobs or [], strict=True):
        assert top[token] == logprob
        assert len(top) in (3, 4)
    assert min(len(sample.token_ids) for sample in expected[6].samples) >= 15
