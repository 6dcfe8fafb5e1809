"""Prompts with images: a worker reports what a trainer computes with the same images, however they were scheduled."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from samebit.kernels import bind, image_features, token_logprobs
from samebit.kernels.binding import binding_of
from samebit.rollout import (
    ImageError,
    PromptWithImages,
    RequestError,
    RequestOutput,
    RolloutConfig,
    RolloutWorker,
    SamplingParams,
    WorkerStateError,
)
from samebit.rollout.async_worker import AsyncWorker
from samebit.rollout.requests.images import PromptImages
from samebit.rollout.runner import model_runner
from samebit.rollout.runner.images import features
from samebit.weight_sync.transports.addresses import Sources

from ..patience import HANG, wait_until
from ..rollout.held_steps import held_steps
from .compare import assert_same_samples, report_temperature
from .families import DTYPES, make_model, paired
from .images import IMAGE, TOWERS, WithImages, joined, make_model_with_images, with_images
from .lora import wake

CASES = min(200, int(os.environ.get("SAMEBIT_SOAK_CASES", "8")))
GIVEN = (
    with_images([(4, 6)], 1),
    with_images([], 2, ends=17),
    with_images([(2, 2), (10, 6)], 3, text=1, ends=1),
    with_images([(8, 14), (2, 12), (4, 4)], 4, text=0, ends=30),
    with_images([(6, 4)], 5, text=20, ends=0),
)
"""Holds prompts with one image, with none, with two at their end, with three side by side, and that end with one."""
PARAMS = [
    SamplingParams(n=2, seed=1, max_tokens=32, ignore_eos=True, logprobs=2),
    SamplingParams(n=2, temperature=0.7, seed=2, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, repetition_penalty=1.3, prompt_logprobs=0),
    SamplingParams(n=3, temperature=0.7, seed=3, max_tokens=40, ignore_eos=True, logit_bias={IMAGE: 6.0}),
    SamplingParams(seed=4, max_tokens=30, ignore_eos=True, logit_bias={IMAGE: 6.0}, prompt_logprobs=0),
]
"""Lets some samples draw placeholders, which are text."""
CHUNKED = {"max_num_batched_tokens": 7, "max_num_seqs": 7, "block_size": 4}
CROWDED = {**CHUNKED, "num_blocks": 33}
ONE = SamplingParams(seed=7, max_tokens=6, ignore_eos=True)


@cache
def bound(name: str = "Qwen2", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return bind(make_model_with_images(name, dtype), ssm_chunk=16)


def own_model() -> PreTrainedModel:
    """Return a model for a test that changes it."""
    return bind(make_model_with_images("Qwen2"))


def vision_of(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    return [part for name, part in model.named_parameters() if ".visual." in name]


def prompt(one: WithImages) -> list[int] | PromptWithImages:
    if not len(one.image_grid_thw):
        return one.token_ids
    return PromptWithImages(one.token_ids, one.pixel_values, one.image_grid_thw)


PROMPTS = [prompt(one) for one in GIVEN]


def repainted(one: WithImages, seed: int = 99) -> WithImages:
    """Return the same sequence with other images of the same sizes."""
    generator = torch.Generator().manual_seed(seed)
    return WithImages(one.token_ids, torch.randn(one.pixel_values.shape, generator=generator), one.image_grid_thw)


def scored(model: PreTrainedModel, one: WithImages, new: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Return the trainer's log-probabilities of a prompt's tokens but the first, and of those sampled behind it."""
    ids = torch.tensor([[*one.token_ids, *new]])
    images = {**joined([one]), "mm_token_type_ids": torch.tensor([[*one.kinds, *[0] * len(new)]])}
    with torch.no_grad():
        return token_logprobs(model, ids, temperature=temperature, **(images if any(one.kinds) else {}))[0]


def assert_trained(
    model: PreTrainedModel,
    prompts: Sequence[WithImages],
    outputs: Sequence[RequestOutput],
    params: Sequence[SamplingParams],
) -> None:
    """Check what was reported of each token against the trainer, of a prompt's too where that was asked for."""
    for one, output, asked in zip(prompts, outputs, params, strict=True):
        assert len(output.samples) == asked.n
        for sample in output.samples:
            scores = scored(model, one, sample.token_ids, report_temperature(asked))[len(one.token_ids) - 1 :]
            assert torch.equal(torch.tensor(sample.logprobs), scores)
        if asked.prompt_logprobs is not None:
            assert output.prompt_logprobs is not None
            assert torch.equal(torch.tensor(output.prompt_logprobs[1:]), scored(model, one, []))


def generated(
    model: PreTrainedModel, prompts: Iterable[Any], params: SamplingParams | list[SamplingParams], **config: Any
) -> tuple[list[RequestOutput], dict[str, float]]:
    with RolloutWorker(model, config=RolloutConfig(**config)) as worker:
        return worker.generate(list(prompts), params), worker.stats()


def assert_alike(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Check the samples, the likeliest tokens and the prompts' log-probabilities of two workers."""
    assert_same_samples(found, expected)
    assert [one.prompt_logprobs for one in found] == [one.prompt_logprobs for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert [sample.top_logprobs for sample in one.samples] == [sample.top_logprobs for sample in other.samples]


@cache
def whole(name: str = "Qwen2", dtype: torch.dtype = torch.float32) -> list[RequestOutput]:
    """Return what a worker samples that computes each prompt in one step."""
    return generated(bound(name, dtype), PROMPTS, PARAMS)[0]


@pytest.mark.parametrize(("name", "dtype"), paired(tuple(TOWERS), DTYPES))
def test_what_a_trainer_computes(name: str, dtype: torch.dtype) -> None:
    """A prompt is computed in one step, in chunks that end inside of images, with preemptions, or without a cache."""
    model = bound(name, dtype)
    memory = CHUNKED if binding_of(model).state_layout is None else {**CHUNKED, "block_size": 16}
    crowded = {**memory, "num_blocks": 132 // memory["block_size"]}
    assert_trained(model, GIVEN, whole(name, dtype), PARAMS)
    assert any(IMAGE in sample.token_ids for output in whole(name, dtype) for sample in output.samples)
    for config in (memory, crowded, {**crowded, "enable_prefix_caching": False}):
        with RolloutWorker(model, config=RolloutConfig(**config)) as worker:
            cold, warm = (worker.generate(PROMPTS, PARAMS) for _ in range(2))
            assert (worker.stats()["preemptions"] > 0) == (config is not memory), "the pool was meant to be too small"
        assert_alike(cold, whole(name, dtype))
        assert_alike(warm, whole(name, dtype))
        if config is memory:
            assert sum(output.num_cached_tokens for output in warm) > 50


def test_the_same_experts_compute_a_token_in_every_step() -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True, return_routed_experts=True)
    model = bound("Qwen3Moe")
    plain, _ = generated(model, PROMPTS, params)
    chunked, _ = generated(model, PROMPTS, params, **CHUNKED)
    assert_alike(chunked, plain)
    for one, other in zip(chunked, plain, strict=True):
        for sample, expected in zip(one.samples, other.samples, strict=True):
            assert np.array_equal(sample.routed_experts, expected.routed_experts)
            assert len(sample.routed_experts) == len(one.prompt_token_ids) + 8
    assert_trained(model, GIVEN, chunked, [params] * len(GIVEN))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_ahead_and_guesses_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """Tokens that are not known yet, and such as are guessed, by n-grams or by a model of text, rotate like others."""
    model, expected = bound(dtype=dtype), whole(dtype=dtype)
    ahead, _ = generated(model, PROMPTS, PARAMS, async_scheduling=True)
    assert_same_samples(ahead, expected)
    ahead, stats = generated(model, PROMPTS[3:4], PARAMS[3:4], async_scheduling=True)
    assert_same_samples(ahead, expected[3:4])
    assert stats["steps_ahead"] > 0
    make_model("Mistral", hidden_size=64, intermediate_size=96, num_hidden_layers=1).save_pretrained(tmp_path)
    guessing = {"num_speculative_tokens": 3, "speculative_step_tokens": 100}
    for options in ({"prompt_lookup_min": 1}, {"prompt_lookup_min": 100, "draft_model": tmp_path}):
        for config in ({}, CROWDED):
            found, stats = generated(model, PROMPTS, PARAMS, **guessing, **options, **config)
            assert_same_samples(found, expected)
            assert stats["draft_tokens"] > 0


def test_equal_images_share_blocks_and_others_do_not() -> None:
    """A block is hit where the tokens are equal up to its end, and the images that have begun by then."""
    one, model = GIVEN[0], bound()  # 5 tokens, an image of 6 tokens, 9 tokens
    other = repainted(one)
    turned = WithImages(one.token_ids, one.pixel_values, one.image_grid_thw[:, [0, 2, 1]])
    halved = WithImages(one.token_ids, one.pixel_values.half(), one.image_grid_thw)
    with RolloutWorker(model, config=RolloutConfig(block_size=4)) as worker:
        outputs = [
            worker.generate([given], ONE)[0]
            for given in (prompt(one), prompt(one), prompt(other), prompt(turned), one.token_ids, prompt(halved))
        ]
        again = worker.generate([prompt(given) for given in (other, turned, one)], ONE)
    assert [output.num_cached_tokens for output in outputs] == [0, 19, 4, 4, 4, 4]
    assert [output.num_cached_tokens for output in again] == [19, 19, 19]
    assert_trained(model, [one, one, other, turned], outputs[:4], [ONE] * 4)
    assert_trained(model, [other, turned, one], again, [ONE] * 3)
    (sample,) = outputs[4].samples
    ids = torch.tensor([[*one.token_ids, *sample.token_ids]])
    with torch.no_grad():
        assert torch.equal(torch.tensor(sample.logprobs), token_logprobs(model, ids)[0, 19:])
    assert len({tuple(output.samples[0].logprobs) for output in outputs[:5]}) == 4


def test_a_turn_goes_on_behind_an_image_of_the_one_before() -> None:
    """An image that begins in a block which the answer fills up is in that block's name."""
    one, model = with_images([(2, 4)], 8, text=9, ends=0), bound()  # the image's first tokens are the 10th and 11th
    with RolloutWorker(model, config=RolloutConfig(block_size=4)) as worker:
        (first,) = worker.generate([prompt(one)], SamplingParams(seed=1, max_tokens=10, ignore_eos=True))
        ids = [*one.token_ids, *(min(token, IMAGE - 1) for token in first.samples[0].token_ids)]
        assert ids == [*one.token_ids, *first.samples[0].token_ids], "a placeholder was sampled: take another seed"
        turn = with_images([(4, 2)], 9, text=3, ends=2)
        longer = WithImages(
            [*ids, *turn.token_ids],
            torch.cat([one.pixel_values, turn.pixel_values]),
            torch.cat([one.image_grid_thw, turn.image_grid_thw]),
        )
        other = repainted(longer)
        found, foreign = (worker.generate([prompt(given)], ONE)[0] for given in (longer, other))
    assert (found.num_cached_tokens, foreign.num_cached_tokens) == (20, 8)
    assert_trained(model, [longer, other], [found, foreign], [ONE] * 2)


def test_images_are_computed_once_while_they_are_needed() -> None:
    """Equal images of requests that run are computed once; a request that runs alone computes its own."""
    prompts = [prompt(GIVEN[3]), prompt(GIVEN[0]), prompt(GIVEN[3])]
    config = RolloutConfig(enable_prefix_caching=False, **CHUNKED)
    with RolloutWorker(bound(), config=config) as worker:
        worker.generate(prompts, ONE)
        stats = worker.stats()
        assert stats["images_computed"] == 4
        assert stats["images_found"] > 4
        worker.generate(prompts[1:2], ONE)
        assert worker.stats()["images_computed"] == 5


@pytest.mark.parametrize(("kept", "computed"), [(1, 7), (features.MOST_BYTES, 4)])
def test_few_features_are_kept(kept: int, computed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that there is no room for are computed again."""
    monkeypatch.setattr(model_runner, "ImageFeatures", partial(features.ImageFeatures, most_bytes=kept))
    given = [GIVEN[3], GIVEN[0], GIVEN[3]]
    found, stats = generated(bound(), map(prompt, given), [ONE] * 3, **CHUNKED, enable_prefix_caching=False)
    assert_trained(bound(), given, found, [ONE] * 3)
    assert stats["images_computed"] == computed


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_an_update_between_the_chunks_of_an_image(in_flight: str) -> None:
    """Rows that are computed after an update are those of the new weights; here only the vision has others."""
    one, model = GIVEN[3], own_model()  # its first image has 28 tokens
    config = RolloutConfig(max_num_batched_tokens=10, max_num_seqs=1)
    with RolloutWorker(model, config=config) as worker:
        (before,) = worker.generate([prompt(one)], ONE)
        worker.reset_prefix_cache()
        tokens, images = (worker.stats()[name] for name in ("prefill_tokens_computed", "images_computed"))
        with held_steps(worker) as released:
            handle = worker.submit(prompt(one), ONE)
            released.release()
            wait_until(lambda: worker.stats()["prefill_tokens_computed"] > tokens)
            worker.pause()  # after one more step at most
        assert worker.stats()["images_computed"] == images + 1
        with worker.weight_update(in_flight=in_flight), torch.no_grad():
            for part in vision_of(model):
                part.mul_(1.1)
        worker.resume()
        during = handle.result(HANG)
        assert worker.stats()["images_computed"] == images + 4
        (after,) = worker.generate([prompt(one)], ONE)
    assert_trained(model, [one], [after], [ONE])
    assert after.num_cached_tokens == (0 if in_flight == "keep" else 64)
    assert before.samples[0].logprobs != after.samples[0].logprobs
    if in_flight == "recompute":
        assert_same_samples([during], [after])
    else:
        assert [version for _, _, version in during.samples[0].kv_versions] == [0, 1]
        assert during.samples[0].logprobs not in (before.samples[0].logprobs, after.samples[0].logprobs)


def test_a_change_of_the_vision_that_was_not_told() -> None:
    """A change of the vision alone is noticed, and nothing of the images before it is used again."""
    one, model = GIVEN[0], own_model()
    with RolloutWorker(model) as worker:
        worker.generate([prompt(one)], ONE)
        with torch.no_grad():
            for part in vision_of(model):
                part.mul_(1.1)
        outputs = worker.generate([prompt(one)], ONE)
        assert worker.stats()["untold_updates"] == 1
    assert_trained(model, [one], outputs, [ONE])
    assert outputs[0].num_cached_tokens == 0


def test_adapters_of_peft_beside_images() -> None:
    adapted = get_peft_model(
        make_model_with_images("Qwen2"), LoraConfig(r=4, target_modules=r".*language_model.*(q_proj|down_proj)")
    )
    wake(adapted)
    bind(adapted)
    outputs, _ = generated(adapted, PROMPTS, ONE, **CHUNKED)
    assert_trained(adapted, GIVEN, outputs, [ONE] * len(GIVEN))
    plain, _ = generated(bound(), PROMPTS[:1], ONE)
    assert plain[0].samples[0].logprobs != outputs[0].samples[0].logprobs


def test_an_image_that_fails_fails_its_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the vision raises fails the requests with that image, in whichever chunk; nothing of it is shared."""
    bad, fault = GIVEN[2], RuntimeError("no memory for the tower")  # its second image is at its end

    def faulty(model: Any, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
        if image_grid_thw.tolist() == [[1, 10, 6]]:
            raise fault
        return image_features(model, pixel_values, image_grid_thw)

    params = [ONE] * 2 + [SamplingParams(n=2, seed=1, max_tokens=3)] * 2
    with RolloutWorker(bound(), config=RolloutConfig(**CHUNKED)) as worker:
        monkeypatch.setattr(features, "image_features", faulty)
        handles = worker.submit_all([PROMPTS[0], PROMPTS[1], prompt(bad), prompt(bad)], params)
        for handle in handles[2:]:
            with pytest.raises(ImageError, match=r"RuntimeError: no memory.* tokens 3 to 17 .*\[1, 10, 6\]") as caught:
                handle.result(HANG)
            assert str(caught.value.__cause__) == str(fault)
        assert_trained(bound(), GIVEN[:2], [handle.result(HANG) for handle in handles[:2]], [ONE] * 2)
        assert worker.stats()["requests_failed"] == 2
        monkeypatch.setattr(features, "image_features", image_features)
        outputs = worker.generate([prompt(bad)] * 2, ONE)
    assert_trained(bound(), [bad] * 2, outputs, [ONE] * 2)


def test_nothing_of_images_outlives_their_request() -> None:
    """Who keeps the handle or the output of a request keeps no pixels, whether it has ended by itself or not."""
    gc.collect()
    with RolloutWorker(bound()) as worker:
        handles = worker.submit_all([PROMPTS[0], PROMPTS[2]], ONE)
        outputs = [handle.result(HANG) for handle in handles]
        worker.pause()
        handles.append(worker.submit(PROMPTS[3], ONE))
        handles[-1].cancel()
        worker.resume()
        outputs.append(handles[-1].result(HANG))
        assert not [one for one in gc.get_objects() if isinstance(one, PromptImages)]
        worker.pause()
        handles += worker.submit_all([PROMPTS[0], PROMPTS[2]], ONE)  # and the worker is closed meanwhile
    for handle in handles[-2:]:
        with pytest.raises(WorkerStateError):
            handle.result(HANG)
    assert not [one for one in gc.get_objects() if isinstance(one, PromptImages)]
    assert [output.samples[0].finish_reason for output in outputs] == ["length", "length", "abort"]


def test_answers_to_other_images_are_no_guesses() -> None:
    """What a prompt was answered with is guessed from for the same prompt with the same images alone."""
    one = GIVEN[0]
    other = WithImages(one.token_ids, one.pixel_values + 1e-6, one.image_grid_thw)  # has the same answer
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    config = RolloutConfig(num_speculative_tokens=3, prompt_lookup_min=5, speculative_step_tokens=100)
    with RolloutWorker(bound(), config=config) as worker:
        guessed, answers = [], []
        for given in (one, one, other):
            before = worker.stats()["draft_tokens"]
            (output,) = worker.generate([prompt(given)], params)
            answers.append(output.samples[0].token_ids)
            guessed.append(worker.stats()["draft_tokens"] - before)
    assert answers[0] == answers[1] == answers[2]
    assert guessed[1] > guessed[0] == guessed[2]


def test_the_given_tensors_are_copied() -> None:
    one = GIVEN[0]
    mine = PromptWithImages(list(one.token_ids), one.pixel_values.clone(), one.image_grid_thw.clone())
    with RolloutWorker(bound()) as worker, torch.inference_mode():
        worker.pause()
        handle = worker.submit(mine, ONE)
        mine.token_ids.clear()
        mine.pixel_values.zero_()
        mine.image_grid_thw.zero_()
        worker.resume()
        output = handle.result(HANG)
    assert_trained(bound(), [one], [output], [ONE])


def test_streams_and_an_event_loop() -> None:
    """A stream brings the tokens of the result, and a worker behind an event loop takes the same prompts."""
    with RolloutWorker(bound(), config=RolloutConfig(**CHUNKED)) as worker:
        handle = worker.submit(PROMPTS[3], PARAMS[3])
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for chunk in handle:
            tokens[chunk.sample] += chunk.token_ids
        assert [*tokens.values()] == [sample.token_ids for sample in handle.result().samples]
        assert_same_samples([handle.result()], whole()[3:4])

        async def generate() -> list[RequestOutput]:
            behind = AsyncWorker(Sources(), worker)
            return [*await behind.generate(PROMPTS[2:4], PARAMS[2:4]), await behind.run(PROMPTS[0], PARAMS[0], "a")]

        assert_same_samples(asyncio.run(generate()), [*whole()[2:4], whole()[0]])


def processed(one: WithImages, **changes: Any) -> dict[str, Any]:
    """Return a prompt as a processor gives it."""
    ids = torch.tensor([one.token_ids])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.tensor([one.kinds])}
    return {**given, **joined([one]), **changes}


def test_what_a_processor_gives() -> None:
    one = GIVEN[0]
    ids = torch.tensor(one.token_ids)
    padded = torch.cat([torch.zeros(3, dtype=torch.long), ids])[None]
    mask = torch.cat([torch.zeros(3, dtype=torch.long), torch.ones_like(ids)])[None]
    given = [
        processed(one),
        processed(one, input_ids=padded, attention_mask=mask),
        processed(one, input_ids=ids, attention_mask=None, pixel_values_videos=None),
        {name: part.tolist() for name, part in processed(one).items()},
    ]
    found, _ = generated(bound(), [PromptWithImages.of(each) for each in given], [ONE] * 4)
    assert_trained(bound(), [one] * 4, found, [ONE] * 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pixel_values": None}, "has no pixel_values, got .*input_ids.* a prompt without images is a list"),
        ({"pixel_values": None, "image_grid_thw": None}, "has no pixel_values and no image_grid_thw"),
        ({"video_grid_thw": torch.ones(1, 3)}, "has video_grid_thw; allowed: images alone"),
        ({"input_ids": torch.ones(2, 20)}, r"input_ids has the shape \[2, 20\]; allowed: one prompt"),
        ({"input_ids": [[1], [1, 2]]}, "input_ids must be a tensor, or numbers that make one"),
        ({"attention_mask": torch.ones(1, 4)}, "attention_mask has 4 numbers, and input_ids 20; allowed: as many"),
        ({"attention_mask": torch.tensor([[1] * 19 + [0]])}, "allowed: ones, behind zeros on the left"),
    ],
)
def test_what_is_no_prompt_of_a_processor(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        PromptWithImages.of(processed(GIVEN[0], **changes))
    with pytest.raises(RequestError, match="gives a mapping of input_ids, pixel_values, image_grid_thw, got 7"):
        PromptWithImages.of(7)


def _with(**changes: Callable[[WithImages], Any]) -> PromptWithImages:
    one = GIVEN[2]  # a token of text, an image of one token, a token of text, an image of 15, a token of text
    fields = {name: vars(one)[name] for name in ("token_ids", "pixel_values", "image_grid_thw")}
    return PromptWithImages(**{**fields, **{name: change(one) for name, change in changes.items()}})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (_with(image_grid_thw=lambda one: one.image_grid_thw[:0], pixel_values=lambda one: one.pixel_values[:0]),
         "has no image; a prompt without images is a list of token ids"),
        (_with(image_grid_thw=lambda one: one.image_grid_thw.tolist()), r"integers \[images, 3\], got \[\["),
        (_with(image_grid_thw=lambda one: one.image_grid_thw.float()), r"got \[2, 3\] of torch.float32"),
        (_with(image_grid_thw=lambda one: one.image_grid_thw[0]), r"integers \[images, 3\], got \[3\] of torch.int64"),
        (_with(image_grid_thw=lambda _: torch.tensor([[1, 2, 2], [2, 10, 6]])), r"\[1\] is \[2, 10, 6\].*a time of 1"),
        (_with(image_grid_thw=lambda _: torch.tensor([[1, 1, 4], [1, 10, 6]])), r"\[0\] is \[1, 1, 4\].*tiples of 2"),
        (_with(image_grid_thw=lambda _: torch.tensor([[1, 0, 2], [1, 10, 6]])), r"\[0\] is \[1, 0, 2\].*positive"),
        (_with(image_grid_thw=lambda one: one.image_grid_thw.flip(0)), r"runs of \[1, 15\] .* take \[15, 1\]"),
        (_with(token_ids=lambda one: one.token_ids[:-2]), r"runs of \[1, 14\] placeholders .* take \[1, 15\]"),
        (_with(token_ids=lambda one: [*one.token_ids, IMAGE]), r"runs of \[1, 15, 1\] placeholders .* take \[1, 15\]"),
        (_with(token_ids=lambda one: [*one.token_ids[:9], 1, *one.token_ids[9:]]), r"runs of \[1, 6, 9\] placeholders"),
        (_with(token_ids=lambda _: []), "the prompt is empty"),
        (_with(token_ids=lambda one: torch.tensor(one.token_ids)), "a prompt must be a list of token ids, got Tensor"),
        (_with(pixel_values=lambda one: one.pixel_values[1:]), r"has the shape \[63, 96\]; allowed: \[64, 96\]"),
        (_with(pixel_values=lambda one: one.pixel_values[:, 1:]), r"has the shape \[64, 95\]; allowed: \[64, 96\]"),
        (_with(pixel_values=lambda one: one.pixel_values.long()), r"a tensor of floats .* \[64, 96\] of torch.int64"),
        (_with(pixel_values=lambda one: one.pixel_values.tolist()), r"pixel_values must be a tensor of .*, got \[\["),
        (_with(pixel_values=lambda one: one.pixel_values.to("meta")), "pixel_values must be a tensor of"),
        (_with(pixel_values=lambda one: one.pixel_values / 0), "has NaN or infinite numbers; allowed: finite ones"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_with_images(given: PromptWithImages, says: str) -> None:
    """What does not fit is refused at submission, and nothing is submitted."""
    with RolloutWorker(bound()) as worker:
        with pytest.raises(RequestError, match=says):
            worker.submit(given)
        with pytest.raises(RequestError, match="prompt 1: "):
            worker.generate([[1, 2], given])
        assert worker.stats()["steps"] == 0


def test_a_model_of_text_takes_no_images() -> None:
    with (
        RolloutWorker(bind(make_model("Qwen2"))) as worker,
        pytest.raises(RequestError, match="has images, and this worker's model computes text alone; allowed: a module"),
    ):
        worker.submit(prompt(GIVEN[0]))


@pytest.mark.soak
@settings(max_examples=CASES)
@given(
    picked=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 2, 4, 16]),
    spare=st.integers(0, 40),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 40),
    options=st.sampled_from(
        [
            {},
            {"enable_prefix_caching": False},
            {"eviction_policy": "ref_zero"},
            {"async_scheduling": True},
            {"num_speculative_tokens": 2, "prompt_lookup_min": 1},
        ]
    ),
    kept=st.sampled_from([1, features.MOST_BYTES]),
)
def test_random_schedules(
    picked: list[int],
    block_size: int,
    spare: int,
    max_num_seqs: int,
    budget: int,
    options: dict[str, Any],
    kept: int,
) -> None:
    """Whatever runs together, in pools and steps of any size, each request gives what it gives alone."""
    config = RolloutConfig(
        block_size=block_size,
        num_blocks=-(-(len(GIVEN[3].token_ids) + 40) // block_size) + spare,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        **options,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "ImageFeatures", partial(features.ImageFeatures, most_bytes=kept))
        worker = RolloutWorker(bound(), config=config)
    with worker:
        for _ in range(2):  # the second time what was computed may be found
            outputs = worker.generate([PROMPTS[number] for number in picked], [PARAMS[number] for number in picked])
            assert_alike(outputs, [whole()[number] for number in picked])
