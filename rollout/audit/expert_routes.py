"""Compare the experts that a worker reports for each token with those that the training forward chooses."""

from __future__ import annotations

import torch
from torch import nn

from samebit.kernels import token_logprobs
from samebit.kernels.binding.experts.routes import RouteLayout, RouteList, Routes, use_notes
from samebit.rollout.audit.compare import Difference
from samebit.rollout.audit.trainer_layouts import device_of
from samebit.rollout.outputs import RequestOutput


def compare_routes(model: nn.Module, layout: RouteLayout, outputs: list[RequestOutput]) -> Difference:
    """Return how many pairs of a token and an expert were compared, and how many of the worker's the trainer lacks."""
    layers = list(layout.layers)
    pairs = differing = 0
    for output in outputs:
        for sample in output.samples:
            if sample.routed_experts is None:
                raise ValueError("a sample has no routed experts")
            own = sample.routed_experts[:, layers]
            ids = torch.tensor([output.prompt_token_ids + sample.token_ids], device=device_of(model))
            theirs = _trained(model, layout, ids)[: len(own), layers]
            pairs += own.size
            differing += int((own[..., None] != theirs[..., None, :]).all(-1).sum())
    return pairs, differing, 0.0


def _trained(model: nn.Module, layout: RouteLayout, ids: torch.Tensor) -> Routes:
    """Return the experts of each token in a training forward, `[tokens, layers, top_k]`."""
    notes = RouteList()
    with use_notes(notes):
        token_logprobs(model, ids)
    return notes.of_rows(layout)
