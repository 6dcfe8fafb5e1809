"""Tokens that are guessed ahead change no bit: a worker that guesses gives the samples of one that does not."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from samebit.kernels import bind
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams, StructuredOutputsParams
from samebit.rollout.drafts.group import Own

from .compare import assert_matches_trainer, assert_same_samples, run
from .families import (
    CAMPAIGN,
    DELTAS,
    DTYPES,
    FAMILIES,
    HYBRIDS,
    KIMI,
    MAX_LEN,
    SHORT_CONVS,
    bound_model,
    make_model,
    paired,
    token_ids,
)
from .lora import SMALLER, config_for, make_peft

GUESSING = {"num_speculative_tokens": 5, "prompt_lookup_min": 1, "speculative_step_tokens": 200}
"""Guesses wherever a token stood before, in steps of any size."""

CROWDED = {"num_blocks": 14, "block_size": 16, "max_num_batched_tokens": 40, "max_num_seqs": 12}
SOME = (*FAMILIES[:3], "Qwen3Moe", "GptOss", "Gemma2")
GUESSED_HYBRIDS = tuple(family for family in dict.fromkeys((*HYBRIDS, *DELTAS, *SHORT_CONVS)) if family not in KIMI)
if not CAMPAIGN:
    GUESSED_HYBRIDS = ("NemotronH", "Bamba", "FalconH1", "Zamba2", "Mamba2", "Qwen3Next", "Qwen3_5", "Lfm2")
(STEM,) = token_ids(40, seed=5)
CHUNK = 16
"""Is the grid of states, of recurrent layers, in tokens: the smallest, so that sequences come past many."""
NEW = 40


def _prompts() -> list[list[int]]:
    (phrase, other) = token_ids(9, 30)
    return [phrase * 5, phrase * 2 + other, other[:1], other * 2]


PARAMS = [
    SamplingParams(n=3, temperature=0.2, seed=1, max_tokens=NEW, ignore_eos=True, logprobs=2),
    SamplingParams(n=1, temperature=0.0, max_tokens=NEW, ignore_eos=True),
    SamplingParams(n=2, temperature=1.0, seed=2, max_tokens=NEW, ignore_eos=True, top_k=40, min_p=0.01),
    SamplingParams(n=2, temperature=0.0, seed=3, max_tokens=NEW, ignore_eos=True, min_tokens=7, logit_bias={5: 2.0}),
]


@pytest.fixture
def undaunted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let wrong guesses change nothing of how many are made."""
    monkeypatch.setattr(Own, "learn", lambda *_: None)


OTHERS = [replace(params, temperature=1.2, seed=7 + number, n=2) for number, params in enumerate(PARAMS)]
"""Asks for other answers to the same prompts, which those of before are wrong guesses of."""


def _again(model: nn.Module, **config: object) -> tuple[list[list[RequestOutput]], dict[str, float]]:
    """Generate with one worker that guesses, the second time from the first answers, which the third are not."""
    with RolloutWorker(model, config=RolloutConfig(**GUESSING, **config)) as worker:  # type: ignore[arg-type]
        found = [worker.generate(_prompts(), params) for params in (PARAMS, PARAMS, OTHERS)]
        return found, worker.stats()


@pytest.mark.usefixtures("undaunted")
@pytest.mark.parametrize(("family", "dtype"), paired(FAMILIES if CAMPAIGN else SOME, DTYPES))
def test_guesses_change_no_bit(family: str, dtype: torch.dtype) -> None:
    model = bound_model(family, dtype)
    plain, _ = run(model, _prompts(), PARAMS)
    other, _ = run(model, _prompts(), OTHERS)
    (first, second, third), stats = _again(model)
    assert 100 < stats["draft_tokens_accepted"] < stats["draft_tokens"] - 50
    assert_same_samples(third, other)
    for found in (first, second):
        assert_same_samples(found, plain)
        assert [[one.top_logprobs for one in out.samples] for out in found] == [
            [one.top_logprobs for one in out.samples] for out in plain
        ]
    crowded, stats = _again(model, **CROWDED)
    assert stats["preemptions"] > 0, "the pool was meant to be too small"
    for found, expected in zip(crowded, (plain, plain, other), strict=True):
        assert_same_samples(found, expected)
    assert_matches_trainer(model, second, PARAMS)


@pytest.mark.usefixtures("undaunted")
@pytest.mark.parametrize(("family", "dtype"), paired(GUESSED_HYBRIDS, DTYPES))
def test_guesses_change_no_bit_of_models_with_states(family: str, dtype: torch.dtype) -> None:
    """The first time hardly a guess is right, when the prompts come again most are; what is cached then, and for the
    next turn, are states that were computed beside guesses.
    """
    model = bound_model(family, dtype, CHUNK)
    plain, _ = run(model, _prompts(), PARAMS, max_model_len=MAX_LEN)
    turns = [[*out.prompt_token_ids, *out.samples[-1].token_ids, 7] for out in plain]
    after, _ = run(model, turns, PARAMS, enable_prefix_caching=False, max_model_len=MAX_LEN)
    for memory in ({}, CROWDED):
        with RolloutWorker(model, config=RolloutConfig(max_model_len=MAX_LEN, **GUESSING, **memory)) as worker:
            for _ in range(2):
                assert_same_samples(worker.generate(_prompts(), PARAMS), plain)
            found = worker.generate(turns, PARAMS)
            stats = worker.stats()
        assert_same_samples(found, after)
        assert stats["draft_tokens_accepted"] > 100
        assert stats["draft_tokens"] > stats["draft_tokens_accepted"] + 40
        assert stats["state_restores"] > 4
        assert (stats["preemptions"] > 0) == bool(memory)
    assert_matches_trainer(model, [*plain, *after], PARAMS * 2)


@pytest.mark.parametrize("guesses", [1, 7, 15])
@pytest.mark.parametrize(("family", "dtype"), paired(("Bamba", "Qwen3Next", "Lfm2"), DTYPES))
def test_guesses_begin_and_end_anywhere_in_a_chunk(family: str, dtype: torch.dtype, guesses: int) -> None:
    """All that may be guessed is right: but for the last token of a chunk, which moves the state."""
    model = bound_model(family, dtype)
    prompts = [STEM[:length] for length in range(20, 20 + CHUNK)]
    params = [SamplingParams(seed=seed, max_tokens=65, ignore_eos=True) for seed in range(CHUNK)]
    plain, _ = run(model, prompts, params)
    config = RolloutConfig(num_speculative_tokens=guesses, prompt_lookup_min=2, speculative_step_tokens=999)
    with RolloutWorker(model, config=config) as worker:
        before = worker.generate(prompts, params), worker.stats()["steps"]
        again = worker.generate(prompts, params), worker.stats()["steps"] - before[1]
    assert_same_samples(before[0], plain)
    assert_same_samples(again[0], plain)
    assert again[1] <= {1: 37, 7: 14, 15: 10}[guesses]


@pytest.mark.parametrize("least", [3, 40])
def test_what_is_guessed_right_spares_steps_and_prompts_come_again(least: int) -> None:
    """The second time all of a prompt's tokens are guessed from its last answers, once as many match as must, and a
    step computes several."""
    model = bound_model("Qwen3", torch.float32)
    prompt, params = token_ids(20), SamplingParams(seed=5, max_tokens=61, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(num_speculative_tokens=4, prompt_lookup_min=least)) as worker:
        first = worker.generate(prompt, params)
        before = worker.stats()
        again = worker.generate(prompt, params)
        after = worker.stats()
        salted = worker.generate(prompt, replace(params, cache_salt="another"))
        apart = worker.stats()
    assert_same_samples(again, first)
    assert_same_samples(salted, first)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["output_tokens"] == 61
    assert grown["draft_tokens_accepted"] >= (44 if least == 3 else 10)
    assert grown["steps"] <= (16 if least == 3 else 52)
    assert apart["draft_tokens_accepted"] - after["draft_tokens_accepted"] < 10


@pytest.mark.parametrize("stop", [12, 13, 14, 15, 16])
@pytest.mark.parametrize("family", ["Llama", "Bamba"])
def test_a_sample_ends_where_it_would_within_tokens_that_were_guessed(family: str, stop: int) -> None:
    model = bound_model(family, torch.float32)
    prompt = token_ids(20)
    params = SamplingParams(seed=5, max_tokens=30, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(num_speculative_tokens=6)) as worker:
        [whole] = worker.generate(prompt, params)
        tokens = whole.samples[0].token_ids
        [short] = worker.generate(prompt, replace(params, max_tokens=stop))
        [stopped] = worker.generate(prompt, replace(params, stop_token_ids=[tokens[stop]]))
        end = tokens.index(tokens[stop]) + 1
        accepted = worker.stats()["draft_tokens_accepted"]
    assert accepted >= 15
    assert short.samples[0].token_ids == tokens[:stop]
    assert short.samples[0].finish_reason == "length"
    assert stopped.samples[0].token_ids == tokens[:end]
    assert stopped.samples[0].logprobs == whole.samples[0].logprobs[:end]
    assert stopped.samples[0].finish_reason == "stop"


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Next"])
def test_weights_that_change_between_two_requests_are_those_of_the_second(family: str) -> None:
    """Guesses of old weights' tokens and blocks are wrong under new ones, and nothing of them stays."""
    model = bind(make_model(family, torch.float32))
    prompt, params = token_ids(40), SamplingParams(n=2, seed=5, max_tokens=30, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(**GUESSING)) as worker:
        worker.generate(prompt, params)
        with worker.weight_update(), torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.03)
        found = worker.generate(prompt, params)
    assert_matches_trainer(model, found, [params])
    plain, _ = run(model, prompt, [params])
    assert_same_samples(found, plain)


@pytest.mark.parametrize("family", ["Qwen3", "GraniteMoeHybrid", "Qwen3_5", "Lfm2"])
def test_guesses_go_through_an_adapter(family: str) -> None:
    """Guesses go through an adapter, beside those of requests without one."""
    trainer = bind(make_peft(family, config=config_for(family, 5)))
    tensors = {key: tensor for key, tensor in trainer.state_dict().items() if ".default." in key}
    both = [replace(params, adapter=adapter) for params in PARAMS[:2] for adapter in ("policy", None)]
    config = RolloutConfig(max_model_len=MAX_LEN, **GUESSING)  # type: ignore[arg-type]
    with RolloutWorker(make_model(family, **SMALLER.get(family, {})), config=config) as worker:
        worker.load_adapter("policy", tensors, config=trainer.peft_config["default"])
        found = [worker.generate(_prompts(), both) for _ in range(2)]
        assert worker.stats()["draft_tokens_accepted"] > 50
    for outputs in found:
        assert_matches_trainer(trainer, outputs[::2], both[::2])
        with trainer.disable_adapter():
            assert_matches_trainer(trainer, outputs[1::2], both[1::2])


@pytest.mark.usefixtures("undaunted")
@pytest.mark.parametrize("family", ["Qwen3Moe", "NemotronH, experts"])
def test_experts_are_those_of_a_worker_without_guesses(family: str) -> None:
    model = bound_model(family, torch.float32)
    params = [replace(each, return_routed_experts=True) for each in PARAMS]
    plain, _ = run(model, _prompts(), params)
    found, stats = run(model, _prompts(), params, **GUESSING)
    assert stats["draft_tokens_accepted"] > 0
    for one, other in zip(found, plain, strict=True):
        for sample, alone in zip(one.samples, other.samples, strict=True):
            assert (sample.routed_experts == alone.routed_experts).all()


def test_requests_with_penalties_are_not_guessed() -> None:
    """What a penalty does depends on the tokens before: their rows can not be computed ahead."""
    model = bound_model("Qwen3", torch.float32)
    params = [SamplingParams(temperature=0.5, seed=1, max_tokens=30, ignore_eos=True, repetition_penalty=1.1)] * 4
    plain, _ = run(model, _prompts(), params)
    found, stats = run(model, _prompts(), params, **GUESSING)
    assert stats["draft_tokens"] == 0
    assert_same_samples(found, plain)
    assert SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")).depends_on_tokens


def test_what_can_not_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="async_scheduling=True launches a step before"):
        RolloutConfig(num_speculative_tokens=2, async_scheduling=True)
    for alone in ({"prompt_lookup_min": 2}, {"speculative_step_tokens": 32}, {"speculative_history_tokens": 0}):
        (name,) = alone
        with pytest.raises(ValueError, match=f"{name} say how tokens are guessed, and num_speculative_tokens=0"):
            RolloutConfig(**alone)
    for wrong in ({"num_speculative_tokens": -1}, {"prompt_lookup_min": 0}, {"speculative_step_tokens": 0}):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"{name} must be an int of at least"):
            RolloutConfig(**wrong)
