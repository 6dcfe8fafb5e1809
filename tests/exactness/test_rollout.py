"""The worker reports what the trainer computes, for every family, however it was scheduled: this is the promise."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from torch import nn

from samebit.kernels.ops import sampling
from samebit.kernels.ops.logprobs import log_softmax, logprobs_of_rows
from samebit.kernels.ops.sampling import add_bias, penalize_counts, penalize_repetition
from samebit.rollout import NoTokenLeftError, RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.engine import step_plan
from samebit.rollout.runner import likely_tokens, sampler
from samebit.rollout.runner.likely_tokens import most_likely

from ..patience import HANG
from .compare import assert_matches_trainer, assert_same_samples, reported, run, tokens_of
from .families import CAMPAIGN, DTYPES, FAMILIES, VOCAB, bound_model, make_model, paired, token_ids
from .layouts import LAYOUTS, alone, assert_same_bits

PROMPTS = token_ids(1, 2, 3, 63, 64, 65, 100)
NEW = 16
PARAMS = [
    SamplingParams(n=n, temperature=temperature, seed=seed, max_tokens=NEW, ignore_eos=True)
    for seed, (n, temperature) in enumerate([(2, 1.0), (1, 0.7), (1, 0.0), (1, 1.0), (2, 0.7), (1, 1.0), (1, 0.7)])
]
CHUNKED = {"max_num_batched_tokens": 40, "max_num_seqs": 12}
CROWDED = {"num_blocks": 9, "block_size": 16}
THREADS = range(1, min(2, numba.config.NUMBA_NUM_THREADS) + 1)


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), paired(FAMILIES, DTYPES, shift=1))
def test_every_family(family: str, dtype: torch.dtype) -> None:
    model = bound_model(family, dtype)
    whole, _ = run(model, PROMPTS, PARAMS)
    layouts = ("left padded", "packed") if CAMPAIGN else (("left padded", "packed")[FAMILIES.index(family) // 2 % 2],)
    for layout in layouts:
        assert assert_matches_trainer(model, whole, PARAMS, layout) == 9 * NEW
    crowded, stats = run(model, PROMPTS, PARAMS, **CHUNKED, **CROWDED)
    assert stats["preemptions"] > 0, "the pool was meant to be too small"
    assert_same_samples(crowded, whole)
    single, _ = run(model, PROMPTS[4:5], PARAMS[4:5], block_size=4)
    assert_same_samples(single, whole[4:5])
    spread = torch.cat(reported(whole)).std()
    assert spread > 0.2, "logits this flat would hide a difference"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("change", "dtype"), paired(("block_size", "num_threads", "max_num_batched_tokens", "max_num_seqs"), DTYPES)
)
def test_bits_do_not_depend_on_the_configuration(change: str, dtype: torch.dtype) -> None:
    values = {
        "block_size": (4, 16, 64, 256),
        "num_threads": THREADS,
        "max_num_batched_tokens": (64, 65, 100, 4096),
        "max_num_seqs": (1, 3, 64),
    }[change]
    model = bound_model("Gemma2", dtype)
    results = [run(model, PROMPTS, PARAMS, **{change: value})[0] for value in values]
    assert_matches_trainer(model, results[0], PARAMS, "right padded")
    for result in results[1:]:
        assert_same_samples(result, results[0])
        assert_same_bits(reported(result, "raw_logprobs"), reported(results[0], "raw_logprobs"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompt_logprobs(layout: str) -> None:
    model = bound_model("Qwen3")
    params = [SamplingParams(max_tokens=1, prompt_logprobs=0, seed=1)] * len(PROMPTS)
    outputs, _ = run(model, PROMPTS, params, **CHUNKED)
    assert all(out.prompt_logprobs[0] is None for out in outputs)
    with torch.no_grad():
        expected = LAYOUTS[layout](model, PROMPTS)
    assert_same_bits([torch.tensor(out.prompt_logprobs[1:], dtype=torch.float32) for out in outputs], expected)


def test_prompts_whose_logits_are_made_in_parts_have_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bound_model("Qwen3")
    params = [SamplingParams(max_tokens=1, prompt_logprobs=2, seed=1)] * len(PROMPTS)
    whole, _ = run(model, PROMPTS, params)
    monkeypatch.setattr(step_plan, "SCORED_BYTES", 9 * 4 * VOCAB)
    rows: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda head, given, out: rows.append(out.shape[-2]))
    parts, _ = run(model, PROMPTS, params)
    hook.remove()
    assert max(rows) <= 9 + len(PROMPTS)
    for one, other in zip(parts, whole, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs
        assert one.prompt_top_logprobs == other.prompt_top_logprobs


def test_processing_the_choice_leaves_the_report_alone() -> None:
    model = bound_model("Llama")
    options = [
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"logit_bias": {7: 30.0}},
        {"min_tokens": 5, "stop_token_ids": [7], "logit_bias": {7: 5.0}},
        {"top_k": 3, "top_p": 0.9, "temperature": 0.7, "logprobs": 3},
    ]
    params = [SamplingParams(seed=3, max_tokens=12, **each) for each in options]
    outputs, _ = run(model, PROMPTS, params)
    assert_matches_trainer(model, outputs, params)
    assert outputs[4].samples[0].token_ids == [7] * 12


@pytest.mark.parametrize("vocab", [7, 128, 300, 1009])
def test_the_likeliest_tokens_are_in_order_and_ties_in_that_of_their_ids(vocab: int) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(6, vocab)).round()
    logits[5, 1:] = float("-inf")
    temperatures, own = torch.full((6,), 0.7), torch.full((6,), vocab - 1)
    scores = log_softmax(logits, temperatures)
    order = scores.sort(dim=1, descending=True, stable=True)
    for count in (1, 2, 5, 50, 1009):
        found = most_likely(logits, own, temperatures, count)
        for row, entry in enumerate(found):
            expected = dict(zip(order.indices[row, :count].tolist(), order.values[row, :count].tolist(), strict=True))
            expected.setdefault(vocab - 1, float(scores[row, vocab - 1]))
            assert list(entry.items()) == list(expected.items())


def test_one_call_draws_for_all_whatever_some_of_them_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call draws for all, whatever some of them ask for. Only those whose logits are processed in this step are
    scored apart; ends that are allowed by now change none.
    """
    rows: list[int] = []

    def spied(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        rows.append(len(logits))
        return logprobs_of_rows(logits, tokens, temperatures)

    monkeypatch.setattr(sampler, "logprobs_of_rows", spied)
    monkeypatch.setattr(sampling, "draw", None)
    options = [{"top_k": 5}, {"min_tokens": 2, "stop_token_ids": [7]}, {"top_k": 5, "temperature": 0.0}, {}, {}, {}, {}]
    params = [SamplingParams(seed=3, max_tokens=4, ignore_eos=True, **each) for each in options]
    outputs, _ = run(bound_model("Llama"), PROMPTS, params, async_scheduling=False)
    assert rows == [2, 2, 1, 1]
    assert_matches_trainer(bound_model("Llama"), outputs, params)


def test_the_one_call_and_its_parts_choose_and_report_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one call and its parts, which a GPU has, choose and report the same."""
    options = [
        {"top_p": 0.7, "temperature": 0.7, "logprobs": 2},
        {"min_tokens": 3, "stop_token_ids": list(range(7, 900)), "logprobs": 0},
        {"repetition_penalty": 1.7, "n": 3},
        {"logit_bias": {7: 6.0}, "temperature": 0.0, "presence_penalty": 1.0},
        {"min_p": 0.1, "temperature": 1.3},
        {"n": 2, "temperature": 0.7},
        {"temperature": 0.0},
    ]
    params = [SamplingParams(seed=3, max_tokens=8, **each) for each in options]
    model = bound_model("Llama")
    at_once, _ = run(model, PROMPTS, params)
    monkeypatch.setattr(sampling, "sample", lambda *_: None)
    in_parts, _ = run(model, PROMPTS, params)
    assert_same_samples(in_parts, at_once)
    assert_same_bits(reported(in_parts, "raw_logprobs"), reported(at_once, "raw_logprobs"))
    tops = [[sample.top_logprobs for out in outputs for sample in out.samples] for outputs in (in_parts, at_once)]
    assert tops[0] == tops[1]
    assert_matches_trainer(model, at_once, params)


def test_parameters_at_the_ends_of_float32_choose_and_leave_the_report_alone() -> None:
    model = bound_model("Llama")
    largest = float(torch.finfo(torch.float32).max)
    everything = list(range(VOCAB))
    options = [
        {"logit_bias": {7: largest}, "temperature": 0.25},
        {"logit_bias": {7: largest, 8: -largest}, "temperature": 1.5, "top_p": 0.9},
        {"logit_bias": {7: largest}, "temperature": 0.0},
        {"logit_bias": dict.fromkeys(set(everything) - {7}, -largest), "temperature": 1e-4},
        {"repetition_penalty": 1.2e-38, "temperature": 0.5},
        {"repetition_penalty": largest, "min_p": 0.1},
        {"temperature": 3e38},
        {"temperature": 10**30},
        {"repetition_penalty": 10**30},
        {"logit_bias": {8: -(10**30), 9: 10**30}},
        {"top_k": 10**30},
        {"logit_bias": {7: 1e-45}},
    ]
    params = [SamplingParams(seed=3, max_tokens=4, ignore_eos=True, **each) for each in options]
    outputs, _ = run(model, PROMPTS[:1] * len(options), params)
    assert_matches_trainer(model, outputs[:6], params[:6])
    for output in outputs[:4]:
        assert output.samples[0].token_ids == [7] * 4
    for output in outputs:
        assert len(output.samples[0].token_ids) == 4


def test_a_bias_comes_before_the_penalties_as_in_vllm() -> None:
    """A bias comes before the penalties, as in vLLM, so that a penalty takes a share of it: (1000 + logit) / 2 is below
    700 + logit.
    """
    asked = SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, logit_bias={7: 1000.0, 8: 700.0}, repetition_penalty=2.0
    )
    outputs, _ = run(bound_model("Llama"), [[5, 7], [5, 6]], [asked] * 2)
    assert [output.samples[0].token_ids for output in outputs] == [[8], [7]]


LIKED = {7: 6.0, 8: 5.5, 9: 5.0, 10: 4.5}


def greedily(model: nn.Module, prompt: list[int], count: int, params: SamplingParams) -> list[int]:
    """Choose greedily, with all tokens counted anew before each choice: the oracle of penalties."""
    tokens: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            row = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].float()
        add_bias(row, LIKED)
        penalize_repetition(row, torch.tensor(sorted({*prompt, *tokens})), params.repetition_penalty)
        ids, counts = np.unique(np.array(tokens, np.int64), return_counts=True)
        penalize_counts(row, ids, counts, params.presence_penalty, params.frequency_penalty)
        tokens.append(int(row.argmax()))
    return tokens


def test_penalties_count_the_tokens_of_each_sample_however_it_was_scheduled() -> None:
    model = bound_model("Llama")
    options = [
        {"repetition_penalty": 1.4, "n": 2},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.4, "n": 2},
        {"frequency_penalty": -0.3},
        {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2, "n": 3},
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logit_bias=LIKED, **each) for each in options
    ]
    prompts = [[7, 5, 7, *prompt] for prompt in token_ids(3, 14, 15, 16, 30)]
    whole, _ = run(model, prompts, params)
    crowded, stats = run(model, prompts, params, **CHUNKED, block_size=4, num_blocks=18)
    assert stats["preemptions"] > 0, "the pool was meant to be too small"
    for prompt, asked, one, other in zip(prompts, params, whole, crowded, strict=True):
        expected = greedily(model, prompt, NEW, asked)
        assert len(set(expected)) < NEW, "no token comes twice"
        assert tokens_of([one]) == tokens_of([other]) == [[expected] * asked.n]


def test_a_step_counts_no_token_again_that_an_earlier_one_has_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step counts no token again that an earlier one has counted: a prompt is looked through once for all samples and
    steps.
    """
    unique, looked_through = np.unique, []

    def spied(ids: np.ndarray, **options: bool) -> object:
        looked_through.append(len(ids))
        return unique(ids, **options)

    monkeypatch.setattr(np, "unique", spied)
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1}
    params = [SamplingParams(n=n, seed=1, max_tokens=NEW, ignore_eos=True, **penalties) for n in (3, 1)]
    run(bound_model("Llama"), PROMPTS[-2:], params)
    assert sorted(looked_through) == sorted(map(len, PROMPTS[-2:]))


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7, "top_k": 50, "repetition_penalty": 1.2, "logprobs": 2}])
def test_the_many_samples_of_a_prompt_are_drawn_a_few_at_a_time(
    asked: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of one prompt, whose first tokens come of one step, are drawn a few at a time: no more logits are copied
    than a step of decodes has.
    """
    rows: list[int] = []

    def spied(kernel: Callable[..., object]) -> Callable[..., object]:
        def call(logits: torch.Tensor, *rest: object) -> object:
            rows.append(len(logits))
            return kernel(logits, *rest)

        return call

    for name in ("sample", "draw"):
        monkeypatch.setattr(sampling, name, spied(getattr(sampling, name)))
    options = {"seed": 1, "max_tokens": 1, "ignore_eos": True}
    params = [SamplingParams(n=600, **options), SamplingParams(n=100, **options, **asked)]
    at_once, _ = run(bound_model("Llama"), PROMPTS[-2:], params, max_num_seqs=700)
    assert max(rows) == 700, "the samples were not drawn in one step"
    rows.clear()
    few, stats = run(bound_model("Llama"), PROMPTS[-2:], params, max_num_seqs=7)
    assert stats["steps"] == 1
    assert max(rows) == 7
    assert_same_samples(few, at_once)
    assert [s.top_logprobs for out in few for s in out.samples] == [s.top_logprobs for o in at_once for s in o.samples]


def test_likely_tokens_are_looked_for_at_once_and_are_those_of_each_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Likely tokens are looked for in one call for all, and are those of each request alone, also where others are as
    likely, which some calls have no room for.
    """
    model = make_model("Qwen3")
    half = VOCAB // 2
    with torch.no_grad():
        model.lm_head.weight[half : 2 * half] = model.lm_head.weight[:half]  # two tokens to each log-probability
    counts = (3, 20, 3, None, 0, 20, 3)
    params = [
        SamplingParams(seed=seed, temperature=temperature, max_tokens=4, ignore_eos=True, logprobs=count)
        for seed, (count, temperature) in enumerate(zip(counts, itertools.cycle((1.0, 0.7, 0.0)), strict=False))
    ]
    alone = [run(model, [prompt], [one])[0][0] for prompt, one in zip(PROMPTS, params, strict=True)]
    rows: list[int] = []

    def spied(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        rows.append(len(logits))
        return log_softmax(logits, temperatures)

    monkeypatch.setattr(likely_tokens, "log_softmax", spied)
    together, stats = run(model, PROMPTS, params)
    assert rows == [3, 2] * int(stats["steps"])
    assert_same_samples(together, alone)
    tops, expected = (
        [[list(entry.items()) for entry in out.samples[0].top_logprobs or ()] for out in part]
        for part in (together, alone)
    )
    assert tops == expected
    assert all(first == second > third for (_, first), (_, second), (_, third), *_ in tops[0]), "a tie was not cut"
    of_none = together[counts.index(0)].samples[0]
    assert of_none.top_logprobs == [
        {token: score} for token, score in zip(of_none.token_ids, of_none.logprobs, strict=True)
    ]


def test_parameters_that_rule_all_tokens_out_fail_their_own_request_and_do_not_blame_the_weights() -> None:
    model = bound_model("Llama")
    none = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=list(range(VOCAB)))
    with RolloutWorker(model, config=RolloutConfig(max_model_len=64)) as worker:
        bad, good = worker.submit_all(PROMPTS[:2], [none, PARAMS[1]])
        with pytest.raises(
            NoTokenLeftError, match=r"logits .* are finite, but .* leave no token to choose: .*min_tokens=2"
        ):
            bad.result(HANG)
        assert len(good.result(HANG).samples[0].token_ids) == NEW
        assert worker.stats()["requests_failed"] == 1


def test_a_seed_fixes_the_tokens_and_no_seed_does_not() -> None:
    model = bound_model("Llama")
    prompt, filler = PROMPTS[3], token_ids(5, 80, 33, 1, seed=9)
    params = SamplingParams(n=3, seed=11, max_tokens=NEW, ignore_eos=True)
    (first,), _ = run(model, [prompt], [params])
    others = [SamplingParams(max_tokens=NEW, ignore_eos=True)] * len(filler)
    for position, config in itertools.product((0, 2, 4), ({}, {**CHUNKED, **CROWDED})):
        prompts = [*filler[:position], prompt, *filler[position:]]
        outputs, _ = run(model, prompts, [*others[:position], params, *others[position:]], **config)
        assert_same_samples(outputs[position : position + 1], [first])
    assert len({tuple(sample.token_ids) for sample in first.samples}) == 3
    unseeded, _ = run(model, [prompt] * 8, [SamplingParams(max_tokens=NEW, ignore_eos=True)] * 8)
    assert len({tuple(samples[0]) for samples in tokens_of(unseeded)}) == 8
    again, _ = run(model, [prompt] * 8, [SamplingParams(max_tokens=NEW, ignore_eos=True)] * 8)
    assert_same_samples(again, unseeded)
    reseeded, _ = run(model, [prompt] * 8, [SamplingParams(max_tokens=NEW, ignore_eos=True)] * 8, seed=1)
    assert tokens_of(reseeded) != tokens_of(unseeded)


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), paired(["Gemma3", "Phi3", "Olmo2"], DTYPES))
def test_weights_that_went_through_a_folder(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = bound_model(family, dtype)
    model.save_pretrained(tmp_path)
    here, _ = run(model, PROMPTS, PARAMS)
    with RolloutWorker(tmp_path) as worker:
        assert_same_samples(worker.generate(PROMPTS, PARAMS), here)
        worker.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})
        assert tokens_of(worker.generate(PROMPTS, PARAMS)) != tokens_of(here)
        worker.receive_weights(tmp_path)
        assert_same_samples(worker.generate(PROMPTS, PARAMS), here)
        worker.sleep()
        worker.wake_up()
        assert_same_samples(worker.generate(PROMPTS, PARAMS), here)


def test_a_step_of_the_optimizer_between_two_rollouts() -> None:
    policy = make_model("Qwen3")
    with RolloutWorker(policy, config=RolloutConfig(**CHUNKED)) as worker:
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
        before = None
        for _ in range(3):
            outputs = worker.generate(PROMPTS, PARAMS)
            assert_matches_trainer(policy, outputs, PARAMS, "left padded")
            assert tokens_of(outputs) != before
            before = tokens_of(outputs)
            torch.cat(alone(policy, PROMPTS)).mean().neg().backward()
            with worker.weight_update():
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("count", THREADS)
def test_a_worker_computes_with_the_threads_of_who_builds_it(count: int) -> None:
    """A worker computes with the threads of who builds it, though Numba and torch count the threads of each Python
    thread for itself.
    """
    model = bound_model("Qwen3")
    found: list[tuple[int, int]] = []
    handle = model.model.register_forward_pre_hook(
        lambda *_: found.append((torch.get_num_threads(), numba.get_num_threads()))
    )
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(count)
        run(model, PROMPTS[:1], PARAMS[:1])
    finally:
        numba.set_num_threads(before)
        handle.remove()
    assert set(found) == {(torch.get_num_threads(), count)}
