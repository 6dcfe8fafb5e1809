"""The head with its log-probabilities has the bits of whole logits, exact gradients, and a bound on its memory."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebit.kernels.binding.epilogue import Epilogue, scaled_down, scaled_up, soft_capped, unchanged
from samebit.kernels.binding.trainer import logprob_head as scored_head
from samebit.kernels.binding.trainer.logprob_head import scored
from samebit.kernels.binding.trainer.logprob_request import Scoring
from samebit.kernels.ops.linear import linear
from samebit.kernels.ops.logprobs import entropy_from_logits, logprobs_from_logits

from ..campaign import in_pairs, in_turns
from . import reference
from .helpers import DTYPES, assert_near, leaves

ROWS, WIDTH, VOCAB = 130, 100, 1009
CONFIG = SimpleNamespace(final_logit_softcapping=3.0, logits_scaling=2.0, lm_head_multiplier=0.7)
EPILOGUES = (unchanged, soft_capped, scaled_down, scaled_up)


@pytest.fixture(params=[1, 7, 64, ROWS])
def rows_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(scored_head, "BYTES_AT_ONCE", 4 * VOCAB * request.param)
    rows: int = request.param
    return rows


def inputs(dtype: torch.dtype, with_bias: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(ROWS, WIDTH), torch.randn(VOCAB, WIDTH) / 4, torch.randn(VOCAB)
    return x.to(dtype), weight.to(dtype), bias.to(dtype) if with_bias else None


def scoring(with_entropy: bool = True) -> Scoring:
    torch.manual_seed(2)
    return Scoring(torch.randint(VOCAB, (ROWS,)), torch.rand(ROWS) + 0.5, with_entropy)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List the number of logits of each product that is made."""
    sizes: list[int] = []

    def counted(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*operands: Any) -> torch.Tensor:
            found = product(*operands)
            sizes.append(found.numel())
            return found

        return made

    for name in ("linear", "linear_part"):
        monkeypatch.setattr(scored_head, name, counted(getattr(scored_head, name)))
    return sizes


@pytest.mark.soak
@pytest.mark.parametrize(("epilogue", "dtype", "with_bias"), in_pairs(EPILOGUES, DTYPES, (True, False)))
def test_the_bits_are_those_of_the_logits_made_at_once(
    rows_at_once: int, epilogue: Epilogue, dtype: torch.dtype, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = inputs(dtype, with_bias)
    asked = scoring()
    logits = epilogue(CONFIG, linear(x, weight, bias).float())
    sizes = watched(monkeypatch)
    for leaf in (x, x.clone().requires_grad_()):
        scores = scored(leaf, weight, bias, epilogue, CONFIG, asked)
        assert torch.equal(scores.log_probs, logprobs_from_logits(logits, asked.token_ids, asked.temperatures))
        assert torch.equal(scores.entropy, entropy_from_logits(logits, asked.temperatures))
    panels = scored_head._ROWS
    assert max(sizes) == (rows_at_once if rows_at_once < panels else rows_at_once // panels * panels) * VOCAB


@pytest.mark.soak
@pytest.mark.parametrize(("epilogue", "dtype"), in_turns(EPILOGUES, DTYPES))
def test_gradients_are_near_the_oracle(
    rows_at_once: int, epilogue: Epilogue, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs(dtype)
    mine, exact = leaves(*tensors), leaves(*(tensor.double() for tensor in tensors))
    asked, upstream = scoring(), torch.randn(2, ROWS)
    scores = scored(*mine, epilogue, CONFIG, asked)
    sizes = watched(monkeypatch)
    (scores.log_probs @ upstream[0] + scores.entropy @ upstream[1]).backward()
    logits = epilogue(CONFIG, reference.linear(*exact))
    values = reference.logprobs(logits, asked.token_ids, asked.temperatures)
    entropies = reference.entropy(logits, asked.temperatures)
    (values @ upstream[0].double() + entropies @ upstream[1].double()).backward()
    for found, oracle in zip(mine, exact, strict=True):
        assert found.grad.dtype == dtype
        assert_near(found.grad, oracle.grad, 4)
    least = scored_head._LEAST_COLUMNS * ROWS
    assert max(sizes) <= max(rows_at_once * VOCAB, least), "of all rows, a part of the vocabulary"
    assert rows_at_once == ROWS or len(sizes) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_no_less_accurate_than_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the hidden states, a sum over parts, is as near the oracle as that of one product."""
    tensors = inputs(dtype)
    asked, upstream = scoring(with_entropy=False), torch.randn(ROWS)
    (exact, *rest) = leaves(*(tensor.double() for tensor in tensors))
    reference.logprobs(reference.linear(exact, *rest), asked.token_ids, asked.temperatures).backward(upstream.double())

    def error(rows: int) -> float:
        monkeypatch.setattr(scored_head, "BYTES_AT_ONCE", 4 * VOCAB * rows)
        mine = leaves(*tensors)
        scored(*mine, unchanged, CONFIG, asked).log_probs.backward(upstream)
        return float((mine[0].grad.double() - exact.grad).norm())

    assert error(1) <= 1.1 * error(10 * ROWS)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_logits_that_nothing_changes_need_not_be_widened(rows_at_once: int, with_entropy: bool) -> None:
    def also_unchanged(config: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits

    asked, upstream = scoring(with_entropy), torch.linspace(-1, 1, ROWS)
    as_they_are, widened = leaves(*inputs(torch.bfloat16)), leaves(*inputs(torch.bfloat16))
    for tensors, epilogue in ((as_they_are, unchanged), (widened, also_unchanged)):
        scores = scored(*tensors, epilogue, CONFIG, asked)
        ((scores.log_probs + (scores.entropy if with_entropy else 0.0)) @ upstream).backward()
    for found, other in zip(as_they_are, widened, strict=True):
        assert torch.equal(found.grad, other.grad)


FROZEN: dict[str, Callable[..., None]] = {
    "the head": lambda x, weight, bias: (weight.requires_grad_(False), bias.requires_grad_(False)),
    "the body": lambda x, weight, bias: x.requires_grad_(False),
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_what_is_frozen_has_no_gradient(frozen: str) -> None:
    expected, tensors = leaves(*inputs(torch.float32)), leaves(*inputs(torch.float32))
    FROZEN[frozen](*tensors)
    for each in (expected, tensors):
        scored(*each, unchanged, CONFIG, scoring(with_entropy=False)).log_probs.sum().backward()
    for found, all_of_them in zip(tensors, expected, strict=True):
        assert (found.grad is not None) == found.requires_grad
        assert found.grad is None or torch.equal(found.grad, all_of_them.grad)


def test_entropy_alone_has_gradients() -> None:
    tensors = inputs(torch.float32)
    mine, exact = leaves(*tensors), leaves(*(tensor.double() for tensor in tensors))
    scored(*mine, unchanged, CONFIG, scoring()).entropy.sum().backward()
    reference.entropy(reference.linear(*exact), scoring().temperatures).sum().backward()
    for found, oracle in zip(mine, exact, strict=True):
        assert_near(found.grad, oracle.grad, 4)


def test_bad_input_is_named() -> None:
    x, weight, bias = inputs(torch.float32)
    with pytest.raises(ValueError, match="130 tokens are to be scored, but 3 rows reach the head"):
        scored(x[:3], weight, bias, unchanged, CONFIG, scoring())
    ids = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"token_ids must lie in \[0, 5\), got 0\.\.5"):
        Scoring.of(torch.tensor([0, 5]), 1.0, 5)
    with pytest.raises(ValueError, match="temperature must be positive and finite as a float32, got nan"):
        Scoring.of(ids, float("nan"), 5)
