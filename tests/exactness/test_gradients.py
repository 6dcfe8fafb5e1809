"""Gradients: near a float64 Hugging Face oracle, and the same bits however the backward was arranged."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from samebit.kernels import bind

from .families import DTYPES, FAMILIES, make_model, token_ids
from .layouts import LAYOUTS, Scores
from .test_layouts import checkpointing

SEQUENCES = token_ids(65, 2, 100, 30)
OTHERS = token_ids(17, 90, 5, 3, seed=1)
TOLERANCE = {torch.float32: (5e-7, 1e-5), torch.bfloat16: (0.01, 0.1)}
"""Error relative to the oracle, both as 2-norms: of the log-probabilities, and of each parameter's gradient."""


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_near_the_oracle(family: str, dtype: torch.dtype) -> None:
    oracle = make_model(family, dtype).double()
    model = bind(make_model(family, dtype))
    value_error, grad_error = TOLERANCE[dtype]
    layout = LAYOUTS["left padded"]
    found, exact = torch.cat(layout(model, SEQUENCES)), torch.cat(hugging_face(oracle, SEQUENCES))
    assert relative_error(found, exact) < value_error
    mine, theirs = gradients(model, layout, SEQUENCES), gradients(oracle, hugging_face, SEQUENCES)
    errors = {name: relative_error(mine[name], grad) for name, grad in theirs.items()}
    assert max(errors.values()) < grad_error, errors


@pytest.fixture(params=[(f, d) for f in ("Gemma3", "Phi3") for d in DTYPES], ids=str)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return bind(make_model(*request.param))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(model: PreTrainedModel, reentrant: bool) -> None:
    expected = gradients(model, LAYOUTS["packed"], SEQUENCES)
    with checkpointing(model, reentrant):
        assert_equal(gradients(model, LAYOUTS["packed"], SEQUENCES), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_micro_batches_forward_before_either_backward(model: PreTrainedModel, reentrant: bool) -> None:
    """The recomputation of the first must not see the layout of the second."""
    with checkpointing(model, reentrant):
        expected = gradients(model, LAYOUTS["packed"], SEQUENCES, OTHERS)
        losses = [loss(LAYOUTS["packed"](model, batch)) for batch in (SEQUENCES, OTHERS)]
        for each in losses:
            each.backward()
    assert_equal(take_gradients(model), expected)


@pytest.mark.parametrize("name", ["left padded", "right padded", "logits of a packed batch", "two micro-batches"])
def test_layouts_agree_up_to_the_order_of_sums(name: str) -> None:
    model = bind(make_model("Gemma2"))
    expected, found = gradients(model, LAYOUTS["packed"], SEQUENCES), gradients(model, LAYOUTS[name], SEQUENCES)
    for key, grad in expected.items():
        assert relative_error(found[key], grad.double()) < 1e-5, key
