"""Lay the same sequences out in all the ways in which a trainer may compute them, for `samebit check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samebit.kernels import logprobs_from_logits, token_logprobs
from samebit.rollout.audit.workers import device_of

MICRO_BATCH = 1024
"""The most tokens of one training forward, padding included, which bounds the memory of the logits."""


@dataclass(frozen=True)
class Sample:
    """Holds a sequence whose last tokens are to be scored."""

    context: list[int]
    scored: list[int]

    @property
    def ids(self) -> list[int]:
        return self.context + self.scored


Layout = Callable[[nn.Module, list[Sample], float], list[torch.Tensor]]
"""A layout takes (model, samples, temperature) and gives for each sample the log-probabilities of its scored tokens."""


def packed(model: nn.Module, samples: list[Sample], temperature: float) -> list[torch.Tensor]:
    """Score one row, its sequences told apart by their positions; the forward keeps a graph, as in training."""
    found = []
    for batch in _micro_batches(samples):
        ids = torch.tensor([token for sample in batch for token in sample.ids], device=device_of(model))[None]
        positions = torch.cat([torch.arange(len(sample.ids)) for sample in batch])[None]
        scores = token_logprobs(model, ids, position_ids=positions, temperature=temperature).detach()[0].cpu()
        ends = torch.tensor([len(sample.ids) for sample in batch]).cumsum(0) - 1
        found += [scores[int(end) - len(sample.scored) : int(end)] for sample, end in zip(batch, ends, strict=True)]
    return found


def alone(model: nn.Module, samples: list[Sample], temperature: float) -> list[torch.Tensor]:
    """Score each sequence in a forward of its own."""
    return [packed(model, [sample], temperature)[0] for sample in samples]


def left_padded(model: nn.Module, samples: list[Sample], temperature: float) -> list[torch.Tensor]:
    """Score a rectangle with the sequences at its right edge."""
    return _padded(model, samples, temperature, left=True, through_logits=False)


def right_padded(model: nn.Module, samples: list[Sample], temperature: float) -> list[torch.Tensor]:
    """Score a rectangle with the sequences at its left edge."""
    return _padded(model, samples, temperature, left=False, through_logits=False)


def logits_of_padded(model: nn.Module, samples: list[Sample], temperature: float) -> list[torch.Tensor]:
    """Score as a trainer does that calls the model itself, so that the padding is computed too."""
    return _padded(model, samples, temperature, left=True, through_logits=True)


@torch.no_grad()
def of_transformers(module: Any, samples: list[Sample]) -> list[torch.Tensor]:
    """Score each sequence in a forward of a module that is not bound: transformers' own, and torch's log-softmax."""
    found = []
    with _all_of_attention(module):
        for sample in samples:
            ids = torch.tensor([sample.ids], device=device_of(module))
            scores = module(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            found.append(scores.gather(1, ids[0, 1:, None])[-len(sample.scored) :, 0].cpu())
    return found


@contextmanager
def _all_of_attention(module: Any) -> Iterator[None]:
    """Let attention that caps its scores (Gemma-2) be computed as written: transformers' SDPA leaves the cap out."""
    if vars(module.config).get("attn_logit_softcapping") is None:
        yield
        return
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(before)


LAYOUTS: dict[str, Layout] = {
    "each sequence alone": alone,
    "left padded": left_padded,
    "right padded": right_padded,
    "logits of a left-padded batch": logits_of_padded,
}


def _micro_batches(samples: list[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    for sample in samples:
        width = max(len(other.ids) for other in [*batch, sample])
        if batch and width * (len(batch) + 1) > MICRO_BATCH:
            yield batch
            batch = []
        batch.append(sample)
    yield batch


@torch.no_grad()
def _padded(
    model: nn.Module, samples: list[Sample], temperature: float, *, left: bool, through_logits: bool
) -> list[torch.Tensor]:
    found = []
    for batch in _micro_batches(samples):
        width = max(len(sample.ids) for sample in batch) + 3
        starts = [width - len(sample.ids) if left else 0 for sample in batch]
        ids = torch.zeros(len(batch), width, dtype=torch.int64, device=device_of(model))
        mask = torch.zeros_like(ids)
        for row, (sample, start) in enumerate(zip(batch, starts, strict=True)):
            ids[row, start : start + len(sample.ids)] = torch.tensor(sample.ids)
            mask[row, start : start + len(sample.ids)] = 1
        if through_logits:
            logits = model(input_ids=ids, attention_mask=mask).logits
            scores = logprobs_from_logits(logits[:, :-1], ids[:, 1:], temperature)
        else:
            scores = token_logprobs(model, ids, attention_mask=mask, temperature=temperature)
        for row, (sample, start) in enumerate(zip(batch, starts, strict=True)):
            end = start + len(sample.ids) - 1
            found.append(scores[row, end - len(sample.scored) : end].cpu())
    return found
