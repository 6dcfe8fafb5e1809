"""Define the forward that TRL's trainers call with ``fused_lm_head=True``: log-probabilities and entropies.

TRL puts a forward with this switch on the instance of a model (`trl.trainer.utils.add_fused_lm_head`), whose head
multiplies by the weight directly. Here it is the bound model's.

Invariants
----------
* The bits are those of `token_logprobs`, so those that the rollout worker reports.
* Padding is taken out, and only the rows that predict a scored token reach the head.
* Every input is used, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.binding import wrap_forward
from samebit.kernels.binding.lora.peft_model import inner_model
from samebit.kernels.binding.trainer.logprob_request import Scores
from samebit.kernels.binding.trainer.training import token_scores
from samebit.rollout.integrations.trl.token_trees import TREE_INPUTS, TokenTree

IGNORED = -100
"""Marks positions without a label, as everywhere in Hugging Face."""

Forward = Callable[..., Any]


def own_forward(model: object) -> Forward | None:
    """Return the forward on a model's instance, if there is a model and one is there: TRL is about to replace it."""
    return inner_model(model).__dict__.get("forward") if isinstance(model, nn.Module) else None


def give_scores(model: nn.Module, before: Forward | None, temperature: float) -> None:
    """Bind a model that TRL has given its fused forward, and put samebit's in that one's place.

    Args:
        model: a causal language model, or a peft model of one.
        before: the forward that `own_forward` found before TRL's trainer was built.
        temperature: of the log-probabilities.

    Raises:
        BindingError: a model that can not be bound exactly, by name.
    """
    inner = inner_model(model)
    inner.__dict__.pop("forward", None)
    if before is not None:
        inner.__dict__["forward"] = before
    bind(model)
    wrap_forward(model, partial(_scoring, temperature=temperature))


def _scoring(bound: Forward, *, temperature: float) -> Forward:
    """Return the forward around the bound one; each takes the model first."""

    def forward(
        self: nn.Module,
        *args: Any,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels}
            return bound(self, *args, **inputs, **{name: one for name, one in given.items() if one is not None})
        if args:
            raise ValueError("with fused_lm_head=True inputs are given by name")
        scores = _Scorer(self, partial(bound, self), temperature)
        if shift_labels is not None:
            return scores.of_tree(shift_labels=shift_labels, **inputs)
        if labels is None:
            raise ValueError("fused_lm_head=True needs labels or shift_labels, the tokens to score")
        return scores.of_rows(labels=labels, **inputs)

    return forward


class _Scorer:
    """Scores the tokens of one call."""

    def __init__(self, model: nn.Module, forward: Forward, temperature: float) -> None:
        self._model = model
        self._forward = forward
        self._temperature = temperature

    def of_rows(
        self,
        *,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        with_entropy: bool = True,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        **rest: Any,
    ) -> Scores:
        """Score padded rows ``[B, T]``; returns ``[B, T - 1]``, as TRL's own head, entropies too unless they are not
        wanted. What is of images is as `token_logprobs` takes it."""
        _refuse(rest)
        if image_grid_thw is not None and not len(image_grid_thw):  # of a batch with images, a part without
            pixel_values = image_grid_thw = None
        wanted = labels[:, 1:] != IGNORED
        if not torch.equal(labels[:, 1:][wanted], input_ids[:, 1:][wanted]):
            raise ValueError("labels other than the tokens of input_ids can not be scored")
        return self._scores(
            input_ids,
            wanted,
            with_entropy,
            attention_mask=attention_mask,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            mm_token_type_ids=mm_token_type_ids,
        )

    def of_tree(
        self, *, input_ids: torch.Tensor, shift_labels: torch.Tensor, position_ids: torch.Tensor, **rest: Any
    ) -> Scores:
        """Score the row ``[1, N]`` of a tree of samples; returns ``[1, N]``, the score of each position's label."""
        parts = {name: rest.pop(name) for name in TREE_INPUTS if name in rest}
        _refuse(rest)
        tree = TokenTree.of(input_ids[0], position_ids[0], shift_labels[0], **parts)
        scores = self._scores(tree.token_ids[None], tree.scored[None], True, position_ids=tree.positions[None])

        def placed(values: torch.Tensor | None) -> torch.Tensor:
            out = torch.zeros(input_ids.shape[1], dtype=torch.float32, device=input_ids.device)
            return out.index_put((tree.places[:-1][tree.scored],), cast(torch.Tensor, values)[0][tree.scored])[None]

        return Scores(log_probs=placed(scores.log_probs), entropy=placed(scores.entropy))

    def _scores(
        self, input_ids: torch.Tensor, wanted: torch.Tensor, with_entropy: bool, **given: torch.Tensor | None
    ) -> Scores:
        return token_scores(
            self._model,
            input_ids,
            temperature=self._temperature,
            wanted=wanted,
            with_entropy=with_entropy,
            forward=self._forward,
            **given,
        )


def _refuse(inputs: dict[str, Any]) -> None:
    """Raise for inputs that would go unheard.

    Raises:
        ValueError: their names.
    """
    given = [name for name, value in inputs.items() if value is not None]
    if given:
        raise ValueError(f"samebit scores text and images, and has no use for {', '.join(given)}")
