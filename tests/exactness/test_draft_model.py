"""A draft model changes no bit, whatever it guesses: a worker with one gives the samples of one without guesses."""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from samebit.kernels import bind
from samebit.rollout import (
    ModelLoadError,
    RequestOutput,
    RolloutConfig,
    RolloutWorker,
    SamplingParams,
    StructuredOutputsParams,
)

from .compare import assert_matches_trainer, assert_same_samples, run
from .families import CAMPAIGN, DTYPES, FAMILIES, MAX_LEN, VOCAB, bound_model, make_model, paired, token_ids
from .lora import config_for, make_peft

ALONE = {
    "num_speculative_tokens": 5,
    "prompt_lookup_min": MAX_LEN,  # no n-gram is that long
    "speculative_step_tokens": 200,
    "speculative_history_tokens": 0,
}
"""Leaves all guesses to the draft model, in steps of any size."""

CROWDED = {"num_blocks": 16, "block_size": 16, "max_num_batched_tokens": 40, "max_num_seqs": 12}
CASES = min(200, int(os.environ.get("SAMEBIT_SOAK_CASES", "5")))
SOME = (*FAMILIES[:2], "Qwen3Moe", "Gemma2", "GptOss")
PROMPTS = token_ids(9, 1, 40, 2, 70)
PARAMS = [
    SamplingParams(n=3, temperature=0.2, seed=1, max_tokens=30, ignore_eos=True, logprobs=2),
    SamplingParams(n=1, temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(n=2, temperature=1.0, seed=2, max_tokens=35, ignore_eos=True, top_k=40, min_p=0.01),
    SamplingParams(n=2, temperature=0.0, seed=3, max_tokens=20, ignore_eos=True, min_tokens=7, logit_bias={5: 2.0}),
    SamplingParams(n=4, temperature=0.3, seed=4, max_tokens=1),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a draft model of this name, which is made when it is asked for first."""
    made: dict[tuple[str, torch.dtype, tuple[tuple[str, object], ...]], Path] = {}

    def folder_of(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
        key = name, dtype, tuple(changes.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("draft")
            make_model(name, dtype, **changes).save_pretrained(made[key])
        return made[key]

    return folder_of


def _guessed(stats: dict[str, float]) -> tuple[float, float]:
    """Return how many tokens were guessed and how many were right, of a worker that has nothing to do."""
    assert stats["draft_blocks_free"] == stats["draft_blocks_total"] > 0
    return stats["draft_tokens"], stats["draft_tokens_accepted"]


@pytest.mark.parametrize(("family", "dtype"), paired(FAMILIES if CAMPAIGN else SOME, DTYPES))
def test_a_draft_model_changes_no_bit(family: str, dtype: torch.dtype, folders: Any) -> None:
    """The model as its own draft is right wherever a choice is greedy; another one hardly ever is."""
    model = bound_model(family, dtype)
    plain, _ = run(model, PROMPTS, PARAMS)
    other = folders("Mistral", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    for draft, right in ((folders(family, dtype), True), (other, False)):
        for memory in ({}, CROWDED):
            found, stats = run(model, PROMPTS, PARAMS, draft_model=draft, **ALONE, **memory)
            assert_same_samples(found, plain)
            assert [one.top_logprobs for one in found[0].samples] == [one.top_logprobs for one in plain[0].samples]
            made, accepted = _guessed(stats)
            assert made > 30
            assert accepted > (15 if memory else 60) if right else accepted < made / 5
            assert (stats["preemptions"] > 0) == bool(memory), "the pool was meant to be too small"
    assert_matches_trainer(model, found, PARAMS)


@pytest.mark.parametrize(("family", "dtype"), paired(("NemotronH", "Qwen3Next", "Lfm2"), DTYPES))
def test_models_with_states_are_guessed_of_too(family: str, dtype: torch.dtype, folders: Any) -> None:
    model = bound_model(family, dtype, 16)
    plain, _ = run(model, PROMPTS, PARAMS, max_model_len=MAX_LEN)
    found, stats = run(model, PROMPTS, PARAMS, draft_model=folders("Llama"), max_model_len=MAX_LEN, **ALONE)
    assert_same_samples(found, plain)
    assert _guessed(stats)[0] > 30


@pytest.mark.parametrize("rows", [3, 2048])
def test_right_guesses_spare_steps(rows: int, folders: Any) -> None:
    """A greedy sample takes a step for each six tokens, however few of its prompt's tokens fit a call."""
    model = bound_model("Qwen3")
    params = SamplingParams(temperature=0.0, max_tokens=61, ignore_eos=True)
    config = {"max_num_batched_tokens": rows, "max_num_seqs": min(rows, 64)}
    config |= {"speculative_step_tokens": 6} if rows > 3 else {}
    [found], stats = run(model, token_ids(40), [params], draft_model=folders("Qwen3"), **{**ALONE, **config})
    [plain], before = run(model, token_ids(40), [params])
    assert_same_samples([found], [plain])
    assert before["steps"] == 61
    assert stats["steps"] <= (11 if rows > 3 else 55)


@pytest.mark.parametrize("stop", [12, 13, 14, 15, 16])
def test_a_sample_ends_where_it_would_within_tokens_that_were_guessed(stop: int, folders: Any) -> None:
    model = bound_model("Llama")
    prompt = token_ids(20)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(draft_model=folders("Llama"), **ALONE)) as worker:
        [whole] = worker.generate(prompt, params)
        tokens = whole.samples[0].token_ids
        [short] = worker.generate(prompt, replace(params, max_tokens=stop))
        [stopped] = worker.generate(prompt, replace(params, stop_token_ids=[tokens[stop]]))
        end = tokens.index(tokens[stop]) + 1
        assert _guessed(worker.stats())[1] >= 15
    assert short.samples[0].token_ids == tokens[:stop]
    assert short.samples[0].finish_reason == "length"
    assert stopped.samples[0].token_ids == tokens[:end]
    assert stopped.samples[0].logprobs == whole.samples[0].logprobs[:end]
    assert stopped.samples[0].finish_reason == "stop"


@pytest.mark.parametrize("draft_len", [30, MAX_LEN])
def test_sequences_may_be_as_long_as_the_model_allows(draft_len: int, folders: Any) -> None:
    """Beyond the positions of the draft model nothing is guessed."""
    model = bound_model("Llama")
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    draft = folders("Llama", max_position_embeddings=draft_len)
    plain, _ = run(model, token_ids(20, 50), [params] * 2, max_model_len=50 + 7)
    found, stats = run(model, token_ids(20, 50), [params] * 2, max_model_len=50 + 7, draft_model=draft, **ALONE)
    assert [len(out.samples[0].token_ids) for out in found] == [37, 7]
    assert_same_samples(found, plain)
    assert (_guessed(stats)[0] > 20) == (draft_len > 30)


def test_tokens_that_the_draft_model_does_not_know_end_its_guesses(folders: Any) -> None:
    model = bound_model("Llama")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [[5, 6, 7], [5, VOCAB - 1, 7]]
    plain, _ = run(model, prompts, [params] * 2)
    for known in (50, VOCAB - 1):
        found, stats = run(model, prompts, [params] * 2, draft_model=folders("Llama", vocab_size=known), **ALONE)
        assert_same_samples(found, plain)
        assert _guessed(stats)[0] < 100


def test_a_draft_model_that_is_never_right_is_asked_ever_less(folders: Any) -> None:
    model = bound_model("Llama")
    draft = folders("Llama", vocab_size=VOCAB, hidden_size=64)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=250, ignore_eos=True, logit_bias={7: -100.0})
    _, stats = run(model, token_ids(20), [params], draft_model=draft, **ALONE)
    made, accepted = _guessed(stats)
    assert accepted < 3
    assert 5 < made < 30


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("blocks", [1, 4, 11])
def test_a_draft_model_with_little_memory_guesses_of_a_few(blocks: int, caching: bool, folders: Any) -> None:
    model = bound_model("Qwen3")
    per_block = 2 * 2 * 2 * model.config.head_dim * 16 * 4  # keys and values, layers, heads, tokens, bytes
    config = {"draft_model": folders("Qwen3"), "draft_cache_gb": (blocks + 0.5) * per_block / 2**30, **ALONE}
    plain, _ = run(model, PROMPTS, PARAMS)
    found, stats = run(model, PROMPTS, PARAMS, enable_prefix_caching=caching, **config)
    assert_same_samples(found, plain)
    assert stats["draft_blocks_total"] == blocks
    assert _guessed(stats)[1] > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(CASES))
def test_any_schedule_gives_the_samples_of_a_worker_without_guesses(seed: int, folders: Any) -> None:
    """Requests come, are cancelled, and the worker sleeps between, with memory of any size."""
    rng, model = random.Random(seed), bound_model("Qwen3")
    stems = token_ids(60, 60, seed=seed)
    prompts = [[*rng.choice(stems)[: rng.randint(1, 60)], *token_ids(rng.randint(0, 9))[0]] for _ in range(12)]
    params = [
        SamplingParams(
            n=rng.randint(1, 3), temperature=rng.choice([0.0, 0.3, 1.0]), seed=number, max_tokens=rng.randint(1, 60),
            stop_token_ids=rng.sample(range(VOCAB), 20), ignore_eos=True, cache_salt=rng.choice([None, None, "a"]),
        )
        for number in range(len(prompts))
    ]  # fmt: skip
    plain, _ = run(model, prompts, params)
    config = RolloutConfig(
        draft_model=folders("Qwen3") if rng.random() < 0.7 else folders("Llama"),
        draft_cache_gb=rng.randint(4, 60) * 2**-16,
        num_speculative_tokens=rng.randint(1, 7),
        speculative_step_tokens=rng.choice([4, 16, 60]),
        speculative_history_tokens=0,
        num_blocks=rng.randint(33, 80),
        block_size=4,
        max_model_len=132,
        max_num_seqs=rng.randint(2, 9),
        max_num_batched_tokens=rng.choice([9, 40, 2048]),
        enable_prefix_caching=rng.random() < 0.7,
    )
    with RolloutWorker(model, config=config) as worker:
        handles = []
        for prompt, each in zip(prompts, params, strict=True):
            handles.append(worker.submit(prompt, each))
            what = rng.randrange(6)
            if what == 0:
                rng.choice(handles).cancel()
            elif what == 1:
                worker.sleep("kv_cache")
                worker.wake_up()
            elif what == 2:
                next(iter(rng.choice(handles)), None)
        found = [handle.result() for handle in handles]
        _guessed(worker.stats())
    for out, expected in zip(found, plain, strict=True):
        for one, other in zip(out.samples, expected.samples, strict=True):
            count = len(one.token_ids)
            assert one.token_ids == other.token_ids[:count]
            assert torch.equal(torch.tensor(one.logprobs), torch.tensor(other.logprobs[:count]))
            assert one.finish_reason in (other.finish_reason, "abort")
            assert one.finish_reason == "abort" or count == len(other.token_ids)


def test_aborted_requests_leave_nothing(folders: Any) -> None:
    model = bound_model("Llama")
    params = SamplingParams(n=2, temperature=0.0, max_tokens=200, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(draft_model=folders("Llama"), **ALONE)) as worker:
        handles = worker.submit_all(token_ids(30, 30, 40), [params] * 3)
        next(iter(handles[1]))
        for handle in handles:
            handle.cancel()
        ended = [handle.result() for handle in handles]
        [whole] = worker.generate(token_ids(30), params)
        _guessed(worker.stats())
    assert {sample.finish_reason for out in ended[1:] for sample in out.samples} == {"abort"}
    plain, _ = run(model, token_ids(30), [params])
    assert_same_samples([whole], plain)


def test_what_a_worker_sleeps_it_takes_again(folders: Any) -> None:
    """The draft model's memory is given back with the other, in the middle of requests, and its guesses go on."""
    model = bound_model("Llama")
    params = SamplingParams(n=2, temperature=0.0, max_tokens=120, ignore_eos=True)
    plain, _ = run(model, token_ids(30, 40), [params] * 2)
    with RolloutWorker(model, config=RolloutConfig(draft_model=folders("Llama"), **ALONE)) as worker:
        handles = worker.submit_all(token_ids(30, 40), [params] * 2)
        next(iter(handles[1]))
        worker.sleep("kv_cache")
        before = _guessed(worker.stats())
        worker.sleep("kv_cache")
        worker.wake_up()
        found = [handle.result() for handle in handles]
        after = _guessed(worker.stats())
        worker.sleep("kv_cache")
    assert_same_samples(found, plain)
    assert after[1] > before[1] + 50


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_weights_that_change_leave_the_draft_model_alone(in_flight: str, folders: Any) -> None:
    """It goes on with what it has: its guesses are worse, or the same, and the samples those of the new weights."""
    model = bind(make_model("Qwen3"))
    params = SamplingParams(n=2, temperature=0.0, max_tokens=60, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(draft_model=folders("Qwen3"), **ALONE)) as worker:
        running = worker.submit_all(token_ids(40), [params])
        next(iter(running[0]))
        with worker.weight_update(in_flight=in_flight), torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.03)
        running[0].result()
        found = worker.generate(token_ids(40), params)
        assert _guessed(worker.stats())[1] > 20
    assert_matches_trainer(model, found, [params])
    plain, _ = run(model, token_ids(40), [params])
    assert_same_samples(found, plain)


def test_requests_through_an_adapter_are_guessed_of_by_the_plain_draft_model(folders: Any) -> None:
    trainer = bind(make_peft("Qwen3", config=config_for("Qwen3", 5)))
    tensors = {key: tensor for key, tensor in trainer.state_dict().items() if ".default." in key}
    both = [replace(params, adapter=adapter) for params in PARAMS[:2] for adapter in ("policy", None)]
    prompts = [prompt for prompt in PROMPTS[:2] for _ in range(2)]
    config = RolloutConfig(draft_model=folders("Qwen3"), **ALONE)
    with RolloutWorker(make_model("Qwen3"), config=config) as worker:
        worker.load_adapter("policy", tensors, config=trainer.peft_config["default"])
        found = worker.generate(prompts, both)
        assert _guessed(worker.stats())[1] > 20
    assert_matches_trainer(trainer, found[::2], both[::2])
    with trainer.disable_adapter():
        assert_matches_trainer(trainer, found[1::2], both[1::2])


def test_choices_that_depend_on_tokens_are_not_guessed(folders: Any) -> None:
    model = bound_model("Qwen3")
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=30, ignore_eos=True, repetition_penalty=1.1)
    plain, _ = run(model, PROMPTS[:2], [params] * 2)
    found, stats = run(model, PROMPTS[:2], [params] * 2, draft_model=folders("Qwen3"), **ALONE)
    assert stats["draft_tokens"] == 0
    assert_same_samples(found, plain)
    assert SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")).depends_on_tokens


def test_n_grams_that_came_before_are_asked_first(folders: Any) -> None:
    """What a prompt was answered with before is guessed where the draft model would be wrong."""
    model = bound_model("Qwen3")
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    config = RolloutConfig(num_speculative_tokens=5, draft_model=folders("Llama"))
    with RolloutWorker(model, config=config) as worker:
        first: list[RequestOutput] = worker.generate(token_ids(20), params)
        before = _guessed(worker.stats())
        again = worker.generate(token_ids(20), params)
        after = _guessed(worker.stats())
    assert_same_samples(again, first)
    assert before[0] > 5
    assert after[1] - before[1] > 40


def test_what_can_not_be_a_draft_model_is_refused(folders: Any, tmp_path: Path) -> None:
    model = bound_model("Qwen3")

    def worker(**config: Any) -> RolloutWorker:
        return RolloutWorker(model, config=RolloutConfig(num_speculative_tokens=2, **config))

    with pytest.raises(ModelLoadError, match=rf"vocabulary of {VOCAB + 1} tokens, and the model one of {VOCAB}; allow"):
        worker(draft_model=folders("Llama", vocab_size=VOCAB + 1))
    with pytest.raises(ModelLoadError, match=r"draft_model=.* has recurrent layers, .*; allowed is a model with"):
        worker(draft_model=folders("NemotronH"))
    with pytest.raises(ModelLoadError, match=f"{tmp_path} has no config.json"):
        worker(draft_model=tmp_path)
    with pytest.raises(ValueError, match=r"draft_cache_gb=1e-09 does not hold one block of \d+ bytes of draft_model="):
        worker(draft_model=folders("Llama"), draft_cache_gb=1e-9)
    with pytest.raises(ValueError, match=r"draft_cache_gb=2\.0 is the memory of a draft_model, and none is given"):
        worker(draft_cache_gb=2)
    with pytest.raises(
        ModelLoadError, match=r"revision='v1' is for a name of the Hugging Face hub, and .* is a folder"
    ):
        worker(draft_model=folders("Llama"), draft_revision="v1")
    with pytest.raises(ValueError, match="draft_revision='v1' is of a draft_model, and none is given"):
        worker(draft_revision="v1")
    for revision in ("", 5):
        with pytest.raises(ValueError, match=f"draft_revision must be a non-empty string or None, got {revision!r}"):
            worker(draft_model="small", draft_revision=revision)
    with pytest.raises(ValueError, match="draft_model say how tokens are guessed, and num_speculative_tokens=0"):
        RolloutConfig(draft_model="small")
    with pytest.raises(ValueError, match="async_scheduling=True launches a step before"):
        worker(draft_model="small", async_scheduling=True)
    for wrong in ("", 5, model):
        with pytest.raises(ValueError, match="draft_model must be a model folder, a name of the Hugging Face hub"):
            worker(draft_model=wrong)
    for size in (0, -1.0, "1", float("nan")):
        with pytest.raises(ValueError, match="draft_cache_gb must be a number above 0 or None"):
            worker(draft_model="small", draft_cache_gb=size)
