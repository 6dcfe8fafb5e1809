"""Define the forward that verl's fused path calls: log-probabilities and entropy instead of logits.

Invariant: the bound model's forward makes them under a `Scoring`, as it makes those of `token_logprobs`; so they are
bit for bit what the rollout worker reports, and of many logits only a part is in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from samebit.kernels.binding.binding import binding_of, wrap_forward
from samebit.kernels.binding.trainer.logprob_request import Scores, Scoring, use_scoring

Model = TypeVar("Model", bound=nn.Module)
Forward = Callable[..., Any]


def give_logprobs(module: Model) -> Model:
    """Make a bound model take ``temperature`` and ``shift_labels`` and return `Scores`; returns the model."""
    wrap_forward(module, partial(_scoring, vocab_size=binding_of(module).vocab_size))
    return module


def _scoring(bound: Forward, *, vocab_size: int) -> Forward:
    """Return the forward around the bound one; each takes the model first."""

    def forward(
        self: nn.Module,
        *,
        input_ids: torch.Tensor,
        temperature: float | None = None,
        shift_labels: torch.Tensor | None = None,
        with_entropy: bool = False,
        **inputs: Any,
    ) -> Scores:
        """Score ``input_ids`` ``[B, T]``; ``shift_labels``: each position's next token, else found by rolling.

        The last position of a sequence has no next token: its value means nothing, and verl drops it.
        """
        if temperature is None:
            raise ValueError(
                "samebit gives log-probabilities, not logits: set actor_rollout_ref.model.use_fused_kernels"
            )
        labels = input_ids.roll(-1, dims=1) if shift_labels is None else shift_labels
        scoring = Scoring.of(labels, temperature, vocab_size, with_entropy=with_entropy)
        with use_scoring(scoring):
            scores: Scores = bound(self, input_ids=input_ids, **inputs)
        scores.check_float32()
        return scores

    return forward
