"""Compare what a worker chooses with what the training forward chooses: experts, and tokens that sparse attention
reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from samebit.kernels import token_logprobs
from samebit.kernels.binding.experts.routes import RouteLayout, RouteList, Routes, use_notes
from samebit.kernels.binding.latent.indexer import indexers_of
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.rollout.audit.compare import Difference
from samebit.rollout.audit.workers import device_of
from samebit.rollout.config import RolloutConfig
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

Choice = tuple[int, int, npt.NDArray[np.int32]]
"""The number of a layer's indexer, the position of a token, and the positions chosen for it."""


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


def compare_selections(
    model: nn.Module, config: RolloutConfig, prompts: list[list[int]], params: list[SamplingParams]
) -> Difference:
    """Return how many pairs of a token and a chosen one were compared, and how many one of the two sides lacks.

    Requests come one at a time, each cold and then warm: a call then has one sequence.
    """
    pairs = differing = 0
    with RolloutWorker(model, config=config) as worker:
        for prompt, wanted in zip(prompts, params, strict=True):
            with _noted(model) as of_worker:
                outputs = [worker.generate([prompt], replace(wanted, n=1))[0] for _ in ("cold", "warm")]
            tokens = prompt + outputs[0].samples[0].token_ids
            with _noted(model) as of_trainer, torch.no_grad():
                token_logprobs(model, torch.tensor([tokens], device=device_of(model)))
            expected = {(layer, position): chosen for layer, position, chosen in of_trainer}
            for layer, position, chosen in of_worker:
                if position < len(tokens):  # a step that was launched ahead may go on from the last token
                    others = expected[layer, position]
                    pairs += max(len(chosen), len(others))
                    differing += choices_apart(chosen, others)
    if not pairs:
        raise ValueError("no selection of the indexers was seen, so the row would prove nothing")
    return pairs, differing, 0.0


def choices_apart(chosen: npt.NDArray[np.int32], expected: npt.NDArray[np.int32]) -> int:
    """Return how many positions one of two lists lacks; of equal ones in another order, how many stand elsewhere."""
    lacking = max(len(np.setdiff1d(expected, chosen)), len(np.setdiff1d(chosen, expected)))
    return lacking or int((chosen != expected).sum())


def _trained(model: nn.Module, layout: RouteLayout, ids: torch.Tensor) -> Routes:
    """Return the experts of each token in a training forward, `[tokens, layers, top_k]`."""
    notes = RouteList()
    with use_notes(notes):
        token_logprobs(model, ids)
    return notes.of_rows(layout)


@contextmanager
def _noted(model: nn.Module) -> Iterator[list[Choice]]:
    """Note what every indexer chooses."""
    noted: list[Choice] = []

    def note(layer: int, context: ForwardContext, chosen: torch.Tensor) -> None:
        lists = chosen.cpu().numpy()
        for first, start, length in zip(context.row_start, context.starts, context.lengths, strict=True):
            for within in range(length):
                position, row = int(start + within), lists[first + within]
                every = np.arange(position + 1, dtype=np.int32)
                noted.append((layer, position, row[row >= 0] if len(row) else every))

    def hook(layer: int) -> Any:
        return lambda indexer, args, chosen: note(layer, args[2].context, chosen)

    handles = [one.register_forward_hook(hook(layer)) for layer, one in enumerate(indexers_of(model))]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()
