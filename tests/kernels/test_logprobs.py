"""Log-probabilities and gradients are near the oracle at any vocabulary, each row for itself; bad input is refused."""

from collections.abc import Callable

import pytest
import torch

from samebit.kernels import logprobs_from_logits
from samebit.kernels.ops.logprobs import entropy_from_logits, log_softmax

from . import reference
from .helpers import LOW_TEMPERATURES, THREADS, assert_gradient_of_rows, assert_near, far_ahead, leaves, threads

VOCABULARIES = (2, 1009, 50257, 151936)
OF_LOGITS = (logprobs_from_logits, lambda logits, _, temperatures: entropy_from_logits(logits, temperatures))


def rows(vocabulary: int, count: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw logits, tokens and temperatures."""
    torch.manual_seed(vocabulary)
    return torch.randn(count, vocabulary) * 4, torch.randint(vocabulary, (count,)), torch.rand(count) + 0.5


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_values_are_near_the_oracle_and_each_row_is_for_itself(vocabulary: int) -> None:
    logits, tokens, temperatures = rows(vocabulary)
    whole = logprobs_from_logits(logits, tokens, temperatures)
    assert_near(whole, reference.logprobs(logits, tokens, temperatures))
    assert torch.equal(log_softmax(logits, temperatures).gather(1, tokens[:, None])[:, 0], whole)
    for count in (1, 2, 3, 7):
        for number in THREADS:
            with threads(number):
                part = slice(9 - count, 9)
                assert torch.equal(logprobs_from_logits(logits[part], tokens[part], temperatures[part]), whole[part])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_gradients_are_near_the_oracle(vocabulary: int) -> None:
    logits, tokens, temperatures = rows(vocabulary, 3)
    (mine,), (exact,) = leaves(logits), leaves(logits.double())
    upstream = torch.randn(3)
    out = logprobs_from_logits(mine, tokens, temperatures)
    assert torch.equal(out.detach(), logprobs_from_logits(logits, tokens, temperatures))
    out.backward(upstream)
    reference.logprobs(exact, tokens, temperatures).backward(upstream.double())
    assert_near(mine.grad, exact.grad)


@pytest.mark.parametrize("temperature", LOW_TEMPERATURES)
def test_gradients_at_low_temperatures(temperature: float) -> None:
    logits, temperatures = far_ahead(temperature), torch.full((7,), temperature)
    tokens = torch.tensor([0, 1, 0, 1, 0, 1, 0])
    scored, exact, spread, exactly_spread = leaves(logits, logits.double(), logits, logits.double())
    logprobs_from_logits(scored, tokens, temperatures).sum().backward()
    reference.logprobs(exact, tokens, temperatures).sum().backward()
    entropy_from_logits(spread, temperatures).sum().backward()
    reference.entropy(exactly_spread, temperatures).sum().backward()
    logprobs = (logits.double() / temperatures[:, None]).log_softmax(1)
    assert_gradient_of_rows(scored.grad, exact.grad, logprobs)
    assert_gradient_of_rows(spread.grad, exactly_spread.grad, logprobs)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_entropy_is_near_the_oracle_and_each_row_is_for_itself(vocabulary: int) -> None:
    logits, _, temperatures = rows(vocabulary)
    whole = entropy_from_logits(logits, temperatures)
    assert_near(whole, reference.entropy(logits, temperatures))
    for count in (1, 2, 3, 7):
        for number in THREADS:
            with threads(number):
                part = slice(9 - count, 9)
                assert torch.equal(entropy_from_logits(logits[part], temperatures[part]), whole[part])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_gradients_of_entropy_are_near_the_oracle(vocabulary: int) -> None:
    logits, _, temperatures = rows(vocabulary, 3)
    (mine,), (exact,) = leaves(logits), leaves(logits.double())
    upstream = torch.randn(3)
    out = entropy_from_logits(mine, temperatures)
    assert torch.equal(out.detach(), entropy_from_logits(logits, temperatures))
    out.backward(upstream)
    reference.entropy(exact, temperatures).backward(upstream.double())
    assert_near(mine.grad, exact.grad, factor=2)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("what", OF_LOGITS)
def test_logits_in_bfloat16_are_read_as_if_widened(vocabulary: int, what: Callable[..., torch.Tensor]) -> None:
    logits, *others = rows(vocabulary)
    narrow, wide = leaves(logits.bfloat16()), leaves(logits.bfloat16().float())
    for (leaf,) in (narrow, wide):
        found = what(leaf, *others)
        assert torch.equal(found.detach(), what(wide[0].detach(), *others))
        found.backward(torch.linspace(-1, 1, len(found)))
    assert torch.equal(narrow[0].grad, wide[0].grad.bfloat16()), "rounded once"


@pytest.mark.parametrize("what", OF_LOGITS)
def test_callers_may_write_to_a_result(what: Callable[..., torch.Tensor]) -> None:
    """Callers may write to a result, as who masks tokens of a prompt does; the gradient of what is left stays."""
    logits, tokens, temperatures = rows(1009)
    mask = torch.arange(9) % 3 > 0
    one, other = leaves(logits, logits)
    masked = what(one, tokens, temperatures) * mask
    written = what(other, tokens, temperatures)
    written.mul_(mask)
    assert torch.equal(written, masked)
    (masked * 1.5).sum().backward()
    (written * 1.5).sum().backward()
    assert torch.equal(other.grad, one.grad)
    chosen = what(other, tokens, temperatures)
    chosen[~mask] = 0
    assert torch.equal(chosen, masked)


def test_entropy_of_ruled_out_tokens_and_flat_rows() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf, 0.0], [1e4, 0.0, 0.0, 0.0], [torch.nan, 0.0, 0.0, 0.0]])
    (leaf,) = leaves(logits)
    got = entropy_from_logits(leaf, 0.5)
    assert_near(got[:2].detach(), torch.tensor([3.0, 1.0]).log())
    assert got[2].isnan(), "a NaN logit must not be hidden"
    got[0].backward()
    assert torch.equal(leaf.grad[0, 2], torch.tensor(0.0))
    with pytest.raises(ValueError, match="temperature must be positive"):
        entropy_from_logits(logits, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_lowest_finite_logit_rules_out_like_minus_infinity(temperature: float, dtype: torch.dtype) -> None:
    """A token with the lowest finite logit, by which trainers mask unused ones, is ruled out as by minus infinity,
    which it is divided to at a temperature of 0.5.
    """
    found = []
    for masked in (-torch.inf, torch.finfo(dtype).min):
        logits, _, _ = rows(1009, 3)
        logits[:, ::3] = masked
        (leaf,) = leaves(logits.to(dtype))
        entropy = entropy_from_logits(leaf, temperature)
        entropy.sum().backward()
        found.append((entropy.detach(), leaf.grad))
    assert torch.equal(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])
    assert not found[1][1][:, ::3].any()
    assert found[1][1].any()


def test_the_fast_and_the_slow_call_are_one_formula() -> None:
    logits, tokens, _ = rows(1009)
    half = logits.bfloat16()
    assert torch.equal(logprobs_from_logits(half, tokens, 0.7), logprobs_from_logits(half.float(), tokens, 0.7))
    strided = torch.stack([logits, logits], dim=-1)[..., 0]
    assert torch.equal(logprobs_from_logits(strided, tokens), logprobs_from_logits(logits, tokens))
    shaped = logprobs_from_logits(logits.view(3, 3, -1), tokens.view(3, 3))
    assert torch.equal(shaped.flatten(), logprobs_from_logits(logits, tokens))


def test_extreme_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, -torch.inf, 0.0], [3e38, 3e38, -3e38], [torch.nan, 0.0, 0.0]])
    got = logprobs_from_logits(logits, torch.tensor([0, 0, 1, 1]))
    assert_near(got[:3], reference.logprobs(logits[:3], torch.tensor([0, 0, 1])))
    assert got[3].isnan(), "a NaN logit must not be hidden"
    assert logprobs_from_logits(logits[1:2], torch.tensor([1])).item() == -torch.inf


@pytest.mark.parametrize(
    ("tokens", "temperature", "message"),
    [
        (torch.tensor([5]), 1.0, "must lie in"),
        (torch.tensor([-1]), 1.0, "must lie in"),
        (torch.tensor([[1]]), 1.0, "must have shape"),
        (torch.tensor([1]), 0.0, "temperature must be positive"),
        (torch.tensor([1]), torch.nan, "temperature must be positive"),
    ],
)
def test_bad_input_is_named(tokens: torch.Tensor, temperature: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logprobs_from_logits(torch.zeros(1, 5), tokens, temperature)
