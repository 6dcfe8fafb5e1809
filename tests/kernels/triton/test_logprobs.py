"""Log-probabilities, entropy and sampling in Triton are near the oracle; random words are equal to the CPU's."""

import numpy as np
import pytest
import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.options import Filters
from samebit.kernels.ops import logprobs, sampling
from samebit.kernels.ops.logprobs import entropy_from_logits, log_softmax, logprobs_from_logits
from samebit.kernels.triton.vocabulary import chunks
from samebit.kernels.triton.vocabulary import logprobs as gpu_logprobs
from samebit.kernels.triton.vocabulary import sampling as gpu

from .. import reference
from ..helpers import LOW_TEMPERATURES, assert_gradient_of_rows, assert_near, far_ahead, rounded_up
from .gpu import DEVICE, DTYPES, leaf
from .launches import launches

pytestmark = pytest.mark.usefixtures("on_gpu")

VOCABULARIES = (100, 1024, 8201)


def logits_of(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(vocab)
    logits = (torch.randn(rows, vocab) * 4).to(dtype)
    logits[:, ::7] = -torch.inf
    return logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_values_and_gradients_are_near_the_oracle(vocab: int, dtype: torch.dtype) -> None:
    logits, tokens = logits_of(3, vocab, dtype), torch.tensor([1, vocab // 2 // 7 * 7 + 1, vocab - 1])
    logits[2, vocab - 1] = 0
    temperatures = torch.tensor([1.0, 0.7, 2.0])
    found, exact = leaf(logits), logits.double().requires_grad_()
    upstream = torch.randn(2, 3)
    scores = logprobs_from_logits(found, tokens.to(DEVICE), temperatures.to(DEVICE))
    entropy = entropy_from_logits(found, temperatures.to(DEVICE))
    assert scores.dtype == entropy.dtype == torch.float32, "whatever the logits are"
    (scores @ upstream[0].to(DEVICE) + entropy @ upstream[1].to(DEVICE)).backward()
    allowed = exact.masked_fill(exact == -torch.inf, -1e9)
    oracle = reference.logprobs(allowed, tokens, temperatures), reference.entropy(allowed, temperatures)
    (oracle[0] @ upstream[0].double() + oracle[1] @ upstream[1].double()).backward()
    assert_near(scores, oracle[0])
    assert_near(entropy, oracle[1])
    assert found.grad is not None
    assert exact.grad is not None
    assert_near(found.grad, exact.grad, 3)
    whole = log_softmax(logits.to(DEVICE), temperatures.to(DEVICE))
    assert torch.equal(whole.cpu()[range(3), tokens], scores.detach().cpu()), "another normaliser"


@pytest.mark.parametrize("temperature", LOW_TEMPERATURES)
def test_gradients_at_low_temperatures(temperature: float) -> None:
    logits, temperatures = far_ahead(temperature), torch.full((7,), temperature)
    tokens, exact = torch.tensor([0, 1, 0, 1, 0, 1, 0]), logits.double().requires_grad_()
    scored, spread = leaf(logits), leaf(logits)
    logprobs_from_logits(scored, tokens.to(DEVICE), temperatures.to(DEVICE)).sum().backward()
    entropy_from_logits(spread, temperatures.to(DEVICE)).sum().backward()
    oracles = reference.logprobs(exact, tokens, temperatures), reference.entropy(exact, temperatures)
    logprobs = (logits.double() / temperatures[:, None]).log_softmax(1)
    for found, oracle in zip((scored, spread), oracles, strict=True):
        assert found.grad is not None
        assert_gradient_of_rows(found.grad, torch.autograd.grad(oracle.sum(), exact)[0], logprobs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_lowest_finite_logit_rules_out_like_minus_infinity(temperature: float, dtype: torch.dtype) -> None:
    """The lowest finite logit, divided to minus infinity by a temperature of 0.5, rules a token out as that does."""
    found = []
    for masked in (-torch.inf, torch.finfo(dtype).min):
        logits = logits_of(2, 1024, dtype).masked_fill_(torch.arange(1024) % 7 == 0, masked)
        scored = leaf(logits)
        entropy = entropy_from_logits(scored, torch.full((2,), temperature, device=DEVICE))
        entropy.sum().backward()
        assert scored.grad is not None
        found.append((entropy.detach(), scored.grad))
    assert all(map(torch.equal, *found))
    assert not found[1][1][:, ::7].any()
    assert found[1][1].any()


def test_random_words_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    keys = random.integers(0, 2**32, (131, 2), np.uint32)
    counters = random.integers(0, 2**32, (131, 4), np.uint32)
    keys[:2], counters[:2] = 0, 0xFFFFFFFF
    bits = [torch.from_numpy(words) for words in (keys, counters)]
    found = gpu.uniforms(*(words.to(DEVICE) for words in bits)).cpu()
    monkeypatch.setattr(device, "on_gpu", lambda tensor: False)
    assert torch.equal(found, sampling.uniforms(*bits))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_draws_are_those_of_the_cpu(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(12, vocab)
    logits[3] = -torch.inf
    logits[4, 5] = torch.nan
    logits[5] = 1.0  # all alike
    logits[6] = 1.0
    logits[9], logits[10, :1024] = torch.inf, torch.inf
    temperatures = torch.tensor([1.0, 0.0, 0.7, 1.0, 1.0, 0.0, 1.0, 2.0, 0.0, 1.0, 1.0, 0.5])
    temperatures[8] = 0.0
    uniform = torch.tensor([0.0, 0.5, 0.25, 0.5, 0.5, 0.9, 0.5, 0.7, 0.1, 1 - 2.0**-53, 0.9, 0.6], dtype=torch.float64)
    logits[8, 3] = torch.nan
    found = gpu.draw(logits.to(DEVICE), temperatures.to(DEVICE), uniform.to(DEVICE)).cpu()
    monkeypatch.setattr(device, "on_gpu", lambda tensor: False)
    assert found.tolist() == sampling.draw(logits, temperatures, uniform).tolist()
    assert found[[3, 4, 8, 9, 10]].tolist() == [-1] * 5


@pytest.mark.parametrize(("vocab", "peak"), [(32, 0), (3000, 0), (3000, 1024), (3000, 2900)])
def test_what_a_chunk_s_sum_was_rounded_up_by_goes_to_a_likely_token(vocab: int, peak: int) -> None:
    given = (part.to(DEVICE) for part in rounded_up(vocab, peak))
    assert gpu.draw(*given).tolist() == [peak] * 5


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_likely_tokens_are_those_of_the_cpu(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The likely tokens are those of the CPU for rows that ask for different things in one call; rows between them
    stay.
    """
    monkeypatch.setattr("samebit.kernels.triton.vocabulary.filters._SORTED", 3)
    asked = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (40, 0.6, 0.02), (vocab, 0.99, 0.0)]
    top_k, top_p, min_p = (np.array(each) for each in zip(*asked, strict=True))
    rows = np.array([9, 0, 2, 3, 7, 5])
    logits = logits_of(10, vocab)
    logits[3] = 1.0  # ties go to the lower id
    expected, found = logits.clone(), logits.to(DEVICE, copy=True)
    given = Filters(rows, np.linspace(0.5, 1.5, 6), top_k, top_p, min_p)
    sampling.keep_likely(found, given)
    monkeypatch.setattr(device, "on_gpu", lambda tensor: False)
    sampling.keep_likely(expected, given)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(expected[[1, 4, 6, 8]], logits[[1, 4, 6, 8]])
    assert (expected[0] > -torch.inf).sum() == 5


def test_a_row_has_the_same_bits_however_its_chunks_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of nine chunks has the same bits by programs of eight chunks, of one, and by one of all."""
    logits = logits_of(3, 8201).to(DEVICE)
    tokens, temperatures = torch.tensor([1, 4001, 8200], device=DEVICE), torch.tensor([1.0, 0.7, 2.0], device=DEVICE)
    uniform = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64, device=DEVICE)
    found = []
    for part in (8, 1, 16):
        for module in (chunks, gpu_logprobs, gpu):
            monkeypatch.setattr(module, "PART", part)
        scores = logprobs_from_logits(logits, tokens, temperatures)
        found.append((scores, log_softmax(logits, temperatures), gpu.draw(logits, temperatures, uniform)))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_rows_that_ask_for_likely_tokens_share_their_launches() -> None:
    launched = []
    for count in (1, 6):
        each = np.ones(count)
        asked = Filters(np.arange(count), each, np.full(count, 5), 0.9 * each, 0.1 * each)
        logits = logits_of(6, 1024).to(DEVICE)
        with launches() as names:
            sampling.keep_likely(logits, asked)
        launched.append([name for name in names if name.startswith("_") or "sort" in name])
    assert launched[0] == launched[1] == ["aten.sort.stable", "_sum_ranks", "_rule_out_unlikely"]


def test_padding_beyond_the_vocabulary_is_not_read() -> None:
    joined = torch.full((2, 1, 1500), torch.nan, device=DEVICE)
    joined[0] = 0.0
    scores = logprobs.logprobs_from_logits(joined[0], torch.tensor([7], device=DEVICE))
    assert torch.allclose(scores.cpu(), -torch.tensor([1500.0]).log())
