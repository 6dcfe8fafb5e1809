"""Share what the gradient tests need: an oracle, a loss, and how gradients are compared."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.experts.routes import RouteList, use_notes

from .families import make_model
from .layouts import LAYOUTS, Scores

FOLLOWED = ("Qwen3Moe", "Olmoe", "Mixtral", "GptOss", "Qwen2Moe", "Qwen3Next", "Qwen3_5Moe")
"""Lists families whose oracle can be given the experts that the model chose; then their gradients are as near as
others'.
"""


def hugging_face(
    model: nn.Module, sequences: list[list[int]], begin: Callable[[int], None] = lambda number: None
) -> Scores:
    """Score each sequence alone by Hugging Face's own forward; ``begin`` is told its number before."""
    scores = []
    for number, sequence in enumerate(sequences):
        begin(number)
        ids = torch.tensor([sequence])
        every = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        scores.append(every.gather(1, ids[0, 1:, None])[:, 0])
    return scores


def follow(oracle: nn.Module, model: nn.Module, sequences: list[list[int]]) -> Callable[[int], None]:
    """Make the oracle's routers choose the experts that a bound model chooses.

    Of softmax routers, whose result is ``(logits, weights, ids)``. Return what tells them which sequence is computed.
    """
    chosen: list[dict[int, torch.Tensor]] = []
    for sequence in sequences:
        notes = RouteList()
        with torch.no_grad(), use_notes(notes):
            LAYOUTS["packed"](model, [sequence])
        chosen.append(notes.rows)
    current = 0

    def choose(layer: int, router: nn.Module, result: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ids = chosen[current][layer].long()
        weights = result[0].softmax(-1).gather(1, ids)
        if vars(router).get("norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return result[0], weights, ids

    routers = [module for module in oracle.modules() if type(module).__name__.endswith("TopKRouter")]
    assert len(routers) == len(chosen[0])
    for layer, router in enumerate(routers):
        router.register_forward_hook(lambda router, _, result, layer=layer: choose(layer, router, result))

    def begin(number: int) -> None:
        nonlocal current
        current = number

    return begin


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


def loss(scores: Scores) -> torch.Tensor:
    flat = torch.cat(scores)
    return (flat * torch.linspace(-1, 2, len(flat), dtype=flat.dtype)).sum()


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad()
    assert all(grad is not None for grad in found.values())
    return found


def gradients(model: nn.Module, scores: Callable[..., Scores], *batches: list[list[int]]) -> dict[str, torch.Tensor]:
    for sequences in batches:
        loss(scores(model, sequences)).backward()
    return take_gradients(model)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


def assert_near_the_oracle(
    family: str,
    dtype: torch.dtype,
    sequences: list[list[int]],
    tolerance: tuple[float, float],
    *,
    same_experts: bool = False,
    **changes: Any,
) -> None:
    """Check that log-probabilities and gradients are near Hugging Face's in float64, within the two errors of
    `tolerance`.

    same_experts: the oracle computes each token with the experts that the model chose for it. changes: of the config.
    """
    oracle = make_model(family, dtype, **changes).double()
    model = bind(make_model(family, dtype, **changes))
    exact_scores = partial(hugging_face, begin=follow(oracle, model, sequences)) if same_experts else hugging_face
    value_error, grad_error = tolerance
    found, exact = LAYOUTS["left padded"](model, sequences), exact_scores(oracle, sequences)
    assert relative_error(torch.cat(found), torch.cat(exact)) < value_error
    for scores in (found, exact):
        loss(scores).backward()
    mine, theirs = take_gradients(model), take_gradients(oracle)
    errors = {name: relative_error(mine[name], grad) for name, grad in theirs.items()}
    assert max(errors.values()) < grad_error, errors
