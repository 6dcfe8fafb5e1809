"""Random numbers, draws and filters are right."""

import numpy as np
import pytest
import torch

from samebit.kernels.cpu import philox
from samebit.kernels.ops.logprobs import logprobs_of_rows
from samebit.kernels.ops.sampling import (
    add_bias,
    draw,
    keep_likely,
    penalize_counts,
    penalize_repetition,
    rule_out,
    sample,
    uniforms,
)

from . import reference
from .helpers import THREADS, filters, rounded_up, threads

ONES = 0xFFFFFFFF


def counters(count: int, stream: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and counters of ``count`` positions."""
    numbers = np.zeros((count, 4), np.uint32)
    numbers[:, 0] = np.arange(count)
    return np.tile(np.array([[stream, 7]], np.uint32), (count, 1)), numbers


def drawn_uniforms(count: int, stream: int = 0) -> torch.Tensor:
    return uniforms(*map(torch.from_numpy, counters(count, stream)))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES,) * 4, (ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: str) -> None:
    """Philox gives the vectors that its distribution, Random123, gives."""
    words = np.empty((1, 4), np.uint32)
    philox.blocks(4, np.array([counter], np.uint32), np.array([key], np.uint32), words, np.empty(1))
    assert " ".join(f"{word:08x}" for word in words[0]) == expected


def test_uniforms_are_53_bits_of_their_counter_alone() -> None:
    keys, numbers = counters(30_000)
    whole = drawn_uniforms(30_000).numpy()
    assert whole.min() >= 0
    assert whole.max() < 1
    assert len(np.unique(whole)) == len(whole)
    assert abs(whole.mean() - 0.5) < 4 / np.sqrt(12 * len(whole))
    words = np.empty((1, 4), np.uint32)
    philox.blocks(4, numbers[5:6], keys[5:6], words, np.empty(1))
    assert whole[5] == ((int(words[0, 0]) >> 5) * 2**26 + (int(words[0, 1]) >> 6)) / 2**53
    for number in THREADS:
        with threads(number):
            some = uniforms(torch.from_numpy(keys[17:20]), torch.from_numpy(numbers[17:20]))
            assert np.array_equal(some.numpy(), whole[17:20])


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return standard deviations above the mean of its distribution; tokens expected under 5 times are one class."""
    expected = counts.sum() * probabilities
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    freedom = len(seen) - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("temperature", "options"),
    [
        (1.0, {}),
        (0.7, {}),
        (1.3, {"top_k": 9}),
        (1.0, {"top_p": 0.8}),
        (0.9, {"top_k": 30, "top_p": 0.9, "min_p": 0.05}),
    ],
)
def test_frequencies_follow_the_distribution(temperature: float, options: dict[str, float]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1500) * 2  # two vocabulary chunks
    wanted = reference.sampling_distribution(logits, temperature, **options).numpy()
    if options:
        asked = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
        keep_likely(logits[None], filters([0], temperature, **asked))
    count = 20_000
    rows = logits.expand(count, -1).contiguous()
    tokens = draw(rows, torch.full((count,), temperature), drawn_uniforms(count, stream=3)).numpy()
    counts = np.bincount(tokens, minlength=1500)
    assert not counts[wanted == 0].any()
    assert chi_square(counts, wanted) < 4
    assert chi_square(counts, np.roll(wanted, 1)) > 4, "the test has no power"


@pytest.mark.parametrize("vocabulary", [1009, 50257, 151936])
def test_a_draw_depends_on_its_row_alone(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    logits, temperatures = torch.randn(7, vocabulary), torch.tensor([1.0, 0.7, 0.0, 1.0, 2.0, 0.5, 1.0])
    uniform = drawn_uniforms(7)
    whole = draw(logits, temperatures, uniform)
    assert whole[2] == logits[2].argmax()
    for count in (1, 2, 3):
        for number in THREADS:
            with threads(number):
                assert torch.equal(draw(logits[-count:], temperatures[-count:], uniform[-count:]), whole[-count:])


def test_the_ends_of_the_distribution() -> None:
    ruled_out = -torch.inf
    logits = torch.tensor(
        [[ruled_out, 1.0, ruled_out, 1.0], [2.0, 5.0, 5.0, 1.0], [ruled_out] * 4, [0.0, torch.nan, 0, 0]]
    )
    ones, last = torch.ones(4), torch.full((4,), float(np.nextafter(1.0, 0.0)), dtype=torch.float64)
    assert draw(logits, ones, torch.zeros(4, dtype=torch.float64)).tolist() == [1, 0, -1, -1]
    assert draw(logits, ones, last).tolist() == [3, 3, -1, -1]
    assert draw(logits[:3], torch.zeros(3), last[:3]).tolist() == [1, 1, -1]


@pytest.mark.parametrize(("vocabulary", "peak"), [(32, 0), (3000, 0), (3000, 1024), (3000, 2900)])
def test_what_a_chunk_s_sum_was_rounded_up_by_goes_to_a_likely_token(vocabulary: int, peak: int) -> None:
    assert draw(*rounded_up(vocabulary, peak)).tolist() == [peak] * 5


@pytest.mark.parametrize("case", range(40))
def test_filters_keep_what_the_oracle_keeps(case: int) -> None:
    rng = np.random.default_rng(case)
    row = torch.from_numpy(rng.normal(size=200).astype(np.float32) * 2)
    if case % 2:
        row = (row * 2).round() / 2  # many ties
    options = {
        "top_k": int(rng.choice([0, 1, 5, 50, 500])),
        "top_p": float(rng.choice([1.0, 0.9, 0.31, 1e-6])),
        "min_p": float(rng.choice([0.0, 0.02, 0.37, 1.0])),
    }
    temperature = float(rng.choice([0.6, 1.0, 1.7]))
    wanted = reference.sampling_distribution(row, temperature, **options) > 0
    before = row.clone()
    keep_likely(row[None], filters([0], temperature, **options))
    assert torch.equal(row > -torch.inf, wanted)
    assert torch.equal(row[wanted], before[wanted]), "a kept logit has changed"


def test_top_p_is_a_share_of_what_min_p_leaves_as_in_vllm() -> None:
    row = torch.tensor([0.5, 0.3, 0.1, 0.1]).log()
    keep_likely(row[None], filters([0], 1.0, 0, 0.6, 0.3))
    assert (row > -torch.inf).tolist() == [True, False, False, False]


def test_penalty_bias_and_exclusion() -> None:
    torch.manual_seed(0)
    row = torch.randn(50)
    penalized = row.clone()
    penalize_repetition(penalized, torch.tensor([3, 7, 8]), 1.5)
    assert torch.allclose(penalized.double(), reference.penalize_repetition(row, {3, 7, 8}, 1.5), rtol=1e-6)
    counted = row.clone()
    penalize_counts(counted, np.array([7, 3]), np.array([1, 3]), 0.3, 0.7)
    expected = row.double()
    expected[3] -= 0.3 + 3 * 0.7
    expected[7] -= 0.3 + 0.7
    assert torch.allclose(counted.double(), expected, rtol=1e-6)
    assert torch.equal(counted[8:], row[8:])
    none = np.array([], np.int64)
    penalize_counts(counted, none, none, 0.3, 0.7)
    assert torch.allclose(counted.double(), expected, rtol=1e-6)
    biased = row.clone()
    add_bias(biased, {3: 2.5, 9: -torch.inf})
    assert biased[3] == row[3] + 2.5
    assert biased[9] == -torch.inf
    rule_out(biased, (0, 1))
    changed = {0, 1, 3, 9}
    assert (biased[:2] == -torch.inf).all()
    assert all(biased[i] == row[i] for i in range(50) if i not in changed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_draws_nothing(temperature: float) -> None:
    logits = torch.tensor([[0.0, torch.nan, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0]])
    tokens = draw(logits, torch.full((2,), temperature), torch.zeros(2, dtype=torch.float64))
    assert tokens[0] == -1
    assert tokens[1] >= 0


def test_one_call_draws_and_scores_as_three_do() -> None:
    keys, numbers = map(torch.from_numpy, counters(64, stream=9))
    logits = 4 * torch.randn(64, 2500, generator=torch.Generator().manual_seed(1))
    logits[5], logits[6, 7], logits[8, 9:] = -torch.inf, torch.nan, -torch.inf
    temperatures = torch.tensor([0.0, 1.0, 0.7, 3.0]).repeat(16)
    found = sample(logits, temperatures, keys, numbers)
    assert found is not None
    tokens, (chosen, scores, at_one) = found
    wanted = draw(logits, temperatures, uniforms(keys, numbers))
    assert torch.equal(chosen.long(), wanted)
    assert torch.equal(tokens, wanted.clamp(min=0))
    report_at = torch.where(temperatures == 0, 1.0, temperatures)
    for given, at in ((scores, report_at), (at_one, torch.ones(64))):
        expected = logprobs_of_rows(logits, tokens, at)
        assert torch.equal(given.float().isnan(), expected.isnan())
        assert torch.equal(given.float().nan_to_num(), expected.nan_to_num())
