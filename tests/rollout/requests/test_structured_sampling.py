"""A grammar goes with every other parameter: what is chosen is what the same filters choose of the allowed tokens, and
what is reported is the trainer's, in each dtype, with and without recurrent layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from samebit.kernels import bind, token_logprobs
from samebit.recipes import tiny_model
from samebit.rollout import (
    NoTokenLeftError,
    RequestOutput,
    RolloutConfig,
    RolloutWorker,
    SampleOutput,
    SamplingParams,
    StructuredOutputsParams,
)

from ..held_steps import held_steps
from ..http.served import byte_tokenizer

TOKENIZER = byte_tokenizer()
WIDTH = len(TOKENIZER) + 70
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
OTHER_END = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
C, D, E = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "cde")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPT = [1, 2, 3]
CD = StructuredOutputsParams(regex="[cd]{12}")
FREE = StructuredOutputsParams(regex="[cd]*")
RULED_OUT = {token: -1e30 for token in range(WIDTH) if token not in (C, D)}
"""Is the bias that leaves what `CD` does before its end."""


def policy(architecture: str = "dense", dtype: torch.dtype = torch.float32, exact: bool = True) -> PreTrainedModel:
    """Return a model of random weights, whose logits are wider than the tokenizer."""
    sizes = {**SIZES, "vocab_size": WIDTH, "initializer_range": 0.2}
    return bind(tiny_model.build_model(TOKENIZER, 3, architecture, **sizes).to(dtype), ssm_chunk=16, exact=exact)


@pytest.fixture(scope="module")
def worker() -> Iterator[RolloutWorker]:
    with RolloutWorker(policy(), tokenizer=TOKENIZER, config=RolloutConfig(num_blocks=128, block_size=16)) as one:
        yield one


def keeping_to(constraint: StructuredOutputsParams, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "seed": 5, "structured_outputs": constraint, **more})


PARAMS: dict[str, SamplingParams] = {
    "greedy": keeping_to(CD, temperature=0),
    "cold": keeping_to(CD, temperature=0.3, n=3),
    "top_k": keeping_to(CD, top_k=1, n=2),
    "top_p": keeping_to(CD, top_p=0.2, n=2),
    "min_p": keeping_to(CD, min_p=0.9, temperature=1.5),
    "all filters": keeping_to(CD, top_k=5, top_p=0.9, min_p=0.01),
    "bias of what is allowed": keeping_to(CD, logit_bias={C: -50.0}),
    "bias of what is not": keeping_to(CD, logit_bias={E: 3e38, END: 90.0}),
    "penalties": keeping_to(CD, repetition_penalty=1.7, presence_penalty=2.0, frequency_penalty=-2.0),
    "the lowest penalty": keeping_to(CD, repetition_penalty=1e-37),
    "min_tokens": keeping_to(FREE, min_tokens=20, logit_bias={END: 90.0}),
    "other ends": keeping_to(CD, ignore_eos=True, stop_token_ids=[OTHER_END]),
    "likely tokens": keeping_to(CD, logprobs=4, temperature=0.8, n=2),
    "a stop token": keeping_to(CD, stop_token_ids=[D]),
    "a stop text": keeping_to(CD, stop=["dc", "cc"]),
}


def check_bits(worker: RolloutWorker, output: RequestOutput, temperature: float) -> None:
    """Compare what is reported with what the trainer computes, bit by bit."""
    for sample in output.samples:
        ids = torch.tensor([output.prompt_token_ids + sample.token_ids])
        scores = token_logprobs(worker.module, ids, temperature=temperature or 1.0).detach()
        assert torch.equal(scores[0, len(output.prompt_token_ids) - 1 :], torch.tensor(sample.logprobs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["dense", "hybrid"])
def test_every_parameter_goes_with_a_grammar(architecture: str, dtype: torch.dtype) -> None:
    """A sample keeps to its grammar whatever else is asked for, and its log-probabilities are the trainer's, bit for
    bit: those of the logits without mask, bias, penalty and filter.
    """
    config = RolloutConfig(num_blocks=256, block_size=16, max_num_seqs=32)
    with RolloutWorker(policy(architecture, dtype), tokenizer=TOKENIZER, config=config) as one:
        outputs = one.generate([PROMPT] * len(PARAMS), list(PARAMS.values()))
        for (name, params), output in zip(PARAMS.items(), outputs, strict=True):
            check_bits(one, output, params.temperature)
            for sample in output.samples:
                check_text(name, sample)


def check_text(name: str, sample: SampleOutput) -> None:
    text = sample.text
    if name == "min_tokens":
        assert re.fullmatch("[cd]{20}", text), "the end comes as soon as it may"
    elif name == "a stop token":
        assert re.fullmatch("c{0,11}", text)
        assert sample.stop_reason == D
    elif name == "a stop text":
        assert re.fullmatch("[cd]{0,11}", text)
        assert sample.stop_reason in ("dc", "cc")
    else:
        assert re.fullmatch("[cd]{12}", text)
        assert sample.token_ids[-1] == (OTHER_END if name == "other ends" else END)
    if name == "bias of what is allowed":
        assert text == "d" * 12
    assert sample.finish_reason == "stop"


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"temperature": 0.7, "n": 3},
        {"top_k": 1},
        {"top_k": 2, "temperature": 1.4},
        {"top_p": 0.4, "n": 3},
        {"min_p": 0.7, "n": 3},
        {"repetition_penalty": 1.5, "n": 2},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "n": 2},
    ],
)
def test_filters_choose_of_what_the_grammar_allows(worker: RolloutWorker, more: dict[str, Any]) -> None:
    """Filters choose of what the grammar allows, as where a bias has ruled out the rest: the same tokens, by the same
    random numbers.
    """
    constrained = keeping_to(CD, **more)
    biased = replace(constrained, structured_outputs=None, logit_bias=RULED_OUT, max_tokens=12, ignore_eos=True)
    masked, free = worker.generate([PROMPT] * 2, [constrained, biased])
    assert [one.token_ids[:12] for one in masked.samples] == [one.token_ids for one in free.samples]
    assert [one.logprobs[:12] for one in masked.samples] == [one.logprobs for one in free.samples]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_likely_tokens_are_those_of_the_model(worker: RolloutWorker, temperature: float) -> None:
    """Likely tokens are those of the model, whatever the grammar rules out: what a request that scores the whole text
    reports of it.
    """
    wanted = keeping_to(CD, temperature=temperature, logprobs=4, prompt_logprobs=3)
    [output] = worker.generate([PROMPT], wanted)
    [sample] = output.samples
    scoring = SamplingParams(max_tokens=1, temperature=temperature, prompt_logprobs=4)
    [scored] = worker.generate([PROMPT + sample.token_ids], scoring)
    assert sample.logprobs == scored.prompt_logprobs[len(PROMPT) :]
    assert sample.top_logprobs == scored.prompt_top_logprobs[len(PROMPT) :]
    assert {token for entry in sample.top_logprobs for token in entry} - {C, D, END}
    alone = worker.generate([PROMPT], replace(wanted, structured_outputs=None, max_tokens=1))[0]
    assert (output.prompt_logprobs, output.prompt_top_logprobs) == (alone.prompt_logprobs, alone.prompt_top_logprobs)


def test_tokens_that_the_tokenizer_has_not_are_never_drawn(worker: RolloutWorker) -> None:
    """Tokens that the tokenizer has not, of a model whose logits are wider, and those of no text, are never drawn."""
    whatever = StructuredOutputsParams(regex="(.|\n){30}")
    nameless = [*range(len(TOKENIZER), WIDTH), OTHER_END]
    params = keeping_to(whatever, n=4, max_tokens=160, logit_bias=dict.fromkeys(nameless, 90.0))
    [output] = worker.generate([PROMPT], params)
    drawn = {token for sample in output.samples for token in sample.token_ids}
    assert not drawn & set(nameless)
    assert END in drawn


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_nothing_left_is_an_error_of_that_request_alone(exact: bool, more: dict[str, Any]) -> None:
    """A grammar that is complete before min_tokens leaves no token, by whatever filter; the others go on."""
    config = RolloutConfig(num_blocks=64, block_size=16, exact=exact)
    with RolloutWorker(policy(exact=exact), tokenizer=TOKENIZER, config=config) as one:
        other = one.submit(PROMPT, keeping_to(CD, **more))
        with pytest.raises(NoTokenLeftError, match=r"structured_outputs.*min_tokens=13"):
            one.generate([PROMPT], keeping_to(CD, min_tokens=13, **more))
        assert re.fullmatch("[cd]{12}", other.result().samples[0].text)


def test_an_aborted_sample_is_the_beginning_of_one(worker: RolloutWorker) -> None:
    """A sample that is aborted has the tokens of one that is not, up to there."""
    long = keeping_to(StructuredOutputsParams(regex="[cd]{90}"), max_tokens=120)
    whole = worker.generate([PROMPT], long)[0].samples[0]
    with held_steps(worker) as steps:
        handle, other = worker.submit(PROMPT, long), worker.submit(PROMPT, keeping_to(CD))
        steps.release(5)
        next(iter(handle))
        handle.cancel()
        part = handle.result().samples[0]
    assert part.finish_reason == "abort"
    assert 0 < len(part.token_ids) < 90
    assert part.token_ids == whole.token_ids[: len(part.token_ids)]
    assert part.logprobs == whole.logprobs[: len(part.token_ids)]
    assert re.fullmatch("[cd]{12}", other.result().samples[0].text)


@pytest.mark.parametrize("architecture", ["dense", "hybrid"])
def test_preempted_samples_go_on_where_they_were(architecture: str) -> None:
    """Samples that are preempted have the tokens and log-probabilities of those that are not."""
    params = [keeping_to(StructuredOutputsParams(regex=f"[cd]{{{40 + at}}}"), max_tokens=60, n=2) for at in range(4)]
    drawn = []
    for blocks in (64, 12):
        config = RolloutConfig(num_blocks=blocks, block_size=16, max_num_seqs=8)
        with RolloutWorker(policy(architecture), tokenizer=TOKENIZER, config=config) as one:
            outputs = one.generate([PROMPT] * 4, params)
            assert bool(one.stats()["preemptions"]) == (blocks == 12)
        drawn.append([(one.token_ids, one.logprobs) for output in outputs for one in output.samples])
    assert drawn[0] == drawn[1]
    assert [len(tokens) for tokens, _ in drawn[0]] == [41, 41, 42, 42, 43, 43, 44, 44]


@contextmanager
def standing(worker: RolloutWorker, in_flight: str) -> Iterator[None]:
    """Let the weights be changed: in an update, or untold between two steps."""
    if in_flight == "untold":
        worker.pause()
        yield
        worker.resume()
    else:
        with worker.weight_update(in_flight=in_flight):
            yield


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "untold"])
def test_a_sample_goes_on_under_other_weights(in_flight: str) -> None:
    """A constrained sample goes on in its grammar under other weights; tokens whose context is of them too have the
    trainer's new log-probabilities.
    """
    with RolloutWorker(policy(), tokenizer=TOKENIZER) as one:
        with held_steps(one) as steps:
            handle = one.submit(PROMPT, keeping_to(StructuredOutputsParams(regex="[cd]{40}"), max_tokens=60, n=2))
            steps.release(9)
            next(iter(handle))
            with standing(one, in_flight), torch.no_grad():
                for weight in one.module.parameters():
                    weight.mul_(1.1)
        output = handle.result()
        for sample in output.samples:
            assert re.fullmatch("[cd]{40}", sample.text)
            assert [span[2] for span in sample.weight_versions] == [0, 1]
            first = sample.weight_versions[1][0]
            ids = torch.tensor([PROMPT + sample.token_ids])
            scores = token_logprobs(one.module, ids)[0, len(PROMPT) - 1 :].detach()
            equal = scores[first:] == torch.tensor(sample.logprobs[first:])
            assert bool(equal.all()) == (in_flight != "keep")
