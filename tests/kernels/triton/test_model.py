"""Whole models on the Triton kernels: the training forward, its gradients and a rollout, beside the CPU's."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

from samebit.kernels import bind, device, token_logprobs
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from ...exactness.families import make_model
from .gpu import DEVICE

NAMES = ("Gemma3", "NemotronH")


@contextmanager
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a machine without a GPU, Triton's interpreter computes on the CPU's tensors."""
    with monkeypatch.context() as patch:
        patch.setattr(device, "on_gpu", lambda tensor: tensor.device.type == DEVICE)
        yield


def small(name: str) -> PreTrainedModel:
    """The interpreter is slow."""
    return make_model(name, torch.float32, vocab_size=100, hidden_size=100, intermediate_size=129)


def gradients(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities, and the gradients of all parameters in one vector."""
    model.zero_grad()
    scores = token_logprobs(model, ids, attention_mask=mask, temperature=0.7)
    scores.sum().backward()
    parts = [part.grad.flatten().cpu() for part in model.parameters() if part.grad is not None]
    return scores.detach().cpu(), torch.cat(parts)


@pytest.mark.parametrize("name", NAMES)
def test_training_is_near_that_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bind(small(name))
    ids = torch.randint(3, 97, (2, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 18:] = 0
    expected, expected_gradient = gradients(model, ids, mask)
    with triton(monkeypatch):
        model.to(DEVICE)
        found, gradient = gradients(model, ids.to(DEVICE), mask.to(DEVICE))
    assert torch.allclose(found, expected, atol=2e-4)
    assert (gradient - expected_gradient).norm() <= 1e-3 * expected_gradient.norm()


@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_is_near_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bind(small(name), ssm_chunk=16).to(DEVICE)
    prompts = [[5], list(range(3, 22)), list(range(3, 20))]
    params = [
        SamplingParams(seed=1, max_tokens=2),
        SamplingParams(seed=2, max_tokens=2, temperature=0.7, top_p=0.9, top_k=50, n=2),
        SamplingParams(seed=3, max_tokens=2, temperature=0.0, repetition_penalty=1.2),
    ]
    config = RolloutConfig(block_size=16, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, device=DEVICE)
    with triton(monkeypatch):
        with RolloutWorker(model, config=config) as worker:
            outputs = worker.generate(prompts, params)
        for out, asked in zip(outputs, params, strict=True):
            for sample in out.samples:
                ids = torch.tensor([out.prompt_token_ids + sample.token_ids], device=DEVICE)
                scores = token_logprobs(model, ids, temperature=asked.temperature or 1.0)[0].detach().cpu()
                own = scores[-len(sample.token_ids) :]
                if DEVICE == "cuda":
                    assert torch.equal(own, torch.tensor(sample.logprobs))
                assert torch.allclose(own, torch.tensor(sample.logprobs), atol=2e-4)
