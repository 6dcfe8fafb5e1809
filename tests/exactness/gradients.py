"""What the gradient tests share: an oracle, a loss, and how gradients are compared."""

from collections.abc import Callable

import torch
from torch import nn

from samebit.kernels import bind

from .families import make_model
from .layouts import LAYOUTS, Scores


def hugging_face(model: nn.Module, sequences: list[list[int]]) -> Scores:
    """Each sequence alone through Hugging Face's own forward."""
    scores = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        every = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        scores.append(every.gather(1, ids[0, 1:, None])[:, 0])
    return scores


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


def loss(scores: Scores) -> torch.Tensor:
    flat = torch.cat(scores)
    return (flat * torch.linspace(-1, 2, len(flat), dtype=flat.dtype)).sum()


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
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
    family: str, dtype: torch.dtype, sequences: list[list[int]], tolerance: tuple[float, float]
) -> None:
    """Log-probabilities and gradients near Hugging Face's own in float64, within the two errors of `tolerance`."""
    oracle = make_model(family, dtype).double()
    model = bind(make_model(family, dtype))
    value_error, grad_error = tolerance
    layout = LAYOUTS["left padded"]
    found, exact = torch.cat(layout(model, sequences)), torch.cat(hugging_face(oracle, sequences))
    assert relative_error(found, exact) < value_error
    mine, theirs = gradients(model, layout, sequences), gradients(oracle, hugging_face, sequences)
    errors = {name: relative_error(mine[name], grad) for name, grad in theirs.items()}
    assert max(errors.values()) < grad_error, errors
