"""A trainer may compute on a stream of its own, or on another GPU than the current one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from samebit.kernels import bind, token_logprobs
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from ..exactness.families import make_model, token_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PROMPTS = token_ids(1, 40, 65)
PARAMS = [SamplingParams(seed=seed, max_tokens=8, ignore_eos=True) for seed in range(len(PROMPTS))]
CYCLES = 1 << 30
"""Counts cycles that take half a second or so: no launch comes so late by itself."""


def config() -> RolloutConfig:
    return RolloutConfig(device="cuda", max_num_seqs=8, max_model_len=128, num_blocks=32)


def model(device: str = "cuda") -> PreTrainedModel:
    return bind(make_model("Qwen3", torch.bfloat16)).to(device)


def logprobs(worker: RolloutWorker) -> list[list[float]]:
    return [sample.logprobs for out in worker.generate(PROMPTS, PARAMS) for sample in out.samples]


@torch.no_grad()
def halve(trained: PreTrainedModel) -> None:
    for part in trained.parameters():
        part.mul_(0.5)


def test_weights_that_are_written_on_another_stream_are_waited_for() -> None:
    """Requests in flight, and those behind the block, read the weights that another stream writes, not those before."""
    halved = model()
    halve(halved)
    with RolloutWorker(halved, config=config()) as worker:
        expected = logprobs(worker)
    trained, own = model(), torch.cuda.Stream()
    with RolloutWorker(trained, config=config()) as worker:
        assert logprobs(worker) != expected
        handles = worker.submit_all(PROMPTS, PARAMS)
        with torch.cuda.stream(own), worker.weight_update(in_flight="recompute"):
            torch.cuda._sleep(CYCLES)
            halve(trained)
        assert logprobs(worker) == expected
        for handle in handles:
            handle.result()


def test_weights_that_a_worker_was_not_told_of_are_waited_for() -> None:
    """Requests behind a write wait for it, and those in flight too: the count of a write is ahead of the write."""
    halved = model()
    halve(halved)
    with RolloutWorker(halved, config=config()) as worker:
        expected = logprobs(worker)
    trained, own = model(), torch.cuda.Stream()
    with RolloutWorker(trained, config=config()) as worker:
        assert logprobs(worker) != expected
        handles = worker.submit_all(PROMPTS, [replace(each, max_tokens=60) for each in PARAMS])
        next(iter(handles[0]))
        with torch.cuda.stream(own):
            torch.cuda._sleep(CYCLES)
            halve(trained)
            assert logprobs(worker) == expected
        outputs = [handle.result() for handle in handles]
        assert worker.stats()["untold_updates"] > 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (sample,) = output.samples
        first = sum(end - start for start, end, version in sample.weight_versions if version < worker.weight_version)
        ids = torch.tensor([prompt + sample.token_ids], device="cuda")
        recomputed = token_logprobs(trained, ids)[0, len(prompt) - 1 :]
        assert torch.equal(recomputed[first:].detach().cpu(), torch.tensor(sample.logprobs[first:]))


def test_weights_are_taken_from_tensors_that_another_stream_is_writing() -> None:
    source, target, own = model(), model(), torch.cuda.Stream()
    with torch.cuda.stream(own), RolloutWorker(target, config=config()) as worker:
        torch.cuda._sleep(CYCLES)
        halve(source)
        worker.receive_weights(source)
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_worker_on_another_gpu_than_the_current_one() -> None:
    with RolloutWorker(model(), config=config()) as worker:
        expected = logprobs(worker)
    with RolloutWorker(model("cuda:1"), config=config()) as worker:
        assert torch.cuda.current_device() == 0
        assert logprobs(worker) == expected
