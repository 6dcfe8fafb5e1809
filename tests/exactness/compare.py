"""Compare what a worker reports with what the trainer computes, bit for bit."""

from collections.abc import Sequence

import torch
from torch import nn

from samebit.kernels.binding.binding import binding_of
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams

from .layouts import LAYOUTS, Scores, assert_same_bits


def report_temperature(params: SamplingParams) -> float:
    return params.temperature or 1.0


def reported(outputs: Sequence[RequestOutput], field: str = "logprobs") -> Scores:
    return [torch.tensor(getattr(sample, field), dtype=torch.float32) for out in outputs for sample in out.samples]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in out.samples] for out in outputs]


def trained(model: nn.Module, outputs: Sequence[RequestOutput], temperature: float, layout: str = "packed") -> Scores:
    """Return the trainer's log-probabilities of the sampled tokens, in the order of `reported`."""
    pairs = [(out, sample) for out in outputs for sample in out.samples]
    if not pairs:
        return []
    with torch.no_grad():
        scores = LAYOUTS[layout](model, [out.prompt_token_ids + s.token_ids for out, s in pairs], temperature)
    return [row[len(row) - len(s.token_ids) :] for row, (_, s) in zip(scores, pairs, strict=True)]


def assert_matches_trainer(
    model: nn.Module, outputs: Sequence[RequestOutput], params: Sequence[SamplingParams], layout: str = "packed"
) -> int:
    """Compare both reported numbers of every token of every sample with the trainer's; return the count of tokens."""
    for temperature in {report_temperature(each) for each in params}:
        group = [out for out, each in zip(outputs, params, strict=True) if report_temperature(each) == temperature]
        assert_same_bits(reported(group), trained(model, group, temperature, layout))
        if temperature != 1.0:
            assert_same_bits(reported(group, "raw_logprobs"), trained(model, group, 1.0, layout))
    return sum(len(row) for row in reported(outputs))


def assert_same_samples(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    assert tokens_of(found) == tokens_of(expected)
    assert_same_bits(reported(found), reported(expected))


def budget(model: nn.Module, checkpoints: int) -> float:
    """Return the `state_cache_gb` that holds so many states of a hybrid model."""
    layout = binding_of(model).state_layout
    return checkpoints * layout.bytes_per_checkpoint(model.get_parameter("lm_head.weight").dtype) / 2**30


def run(
    model: nn.Module, prompts: list[list[int]], params: list[SamplingParams], **config: object
) -> tuple[list[RequestOutput], dict[str, float]]:
    """Generate with a worker of this configuration; return its outputs and its statistics."""
    with RolloutWorker(model, config=RolloutConfig(**config)) as worker:
        return worker.generate(prompts, params), worker.stats()


def assert_cold_and_warm_match_the_trainer(
    model: nn.Module, sequences: list[list[int]], params: SamplingParams
) -> None:
    """Check samples of five prompts, of 1, 2, 17, 70 and 16 tokens, with an empty cache and with a warm one, and the
    next turn of the longest: they are the same, found in the cache as far as they can be, and the trainer's.
    """
    with RolloutWorker(model, config=RolloutConfig(block_size=16, max_num_seqs=8, max_num_batched_tokens=24)) as worker:
        cold, warm = (worker.generate(sequences, params) for _ in range(2))
        turn = [[*out.prompt_token_ids, *out.samples[0].token_ids, 7] for out in warm[3:4]]
        (next_turn,) = worker.generate(turn, params)
    assert [out.num_cached_tokens for out in warm] == [0, 0, 16, 64, 15]
    assert next_turn.num_cached_tokens == 80
    assert_same_samples(warm, cold)
    assert_matches_trainer(model, [*warm, next_turn], [params] * 6)
