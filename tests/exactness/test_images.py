"""Images: a trainer's log-probabilities do not depend on what else is in a call, and are Hugging Face's within
rounding."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from samebit.kernels import bind, image_features, logprobs_from_logits, token_logprobs, token_scores
from samebit.kernels.binding import binding_of

from .families import make_model, make_wrapped, token_ids
from .gradients import loss, relative_error
from .images import IMAGE, TOWERS, WithImages, joined, make_model_with_images, with_images

FAMILIES = tuple(TOWERS)
DTYPES = (torch.float32, torch.bfloat16)
SEQUENCES = (
    with_images([(4, 6)], 1),
    with_images([], 2, ends=17),
    with_images([(2, 2), (10, 6)], 3, text=1, ends=1),
    with_images([(8, 14), (2, 12), (4, 4)], 4, text=1, ends=40),
)
"""Holds sequences of one image, of none, of two that end soon, and of three with a token between them."""


@cache
def bound(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return bind(make_model_with_images(name, dtype))


def alone(model: PreTrainedModel, sequence: WithImages, **changes: Any) -> torch.Tensor:
    ids = torch.tensor([sequence.token_ids])
    given = joined([sequence]) if len(sequence.image_grid_thw) else {}
    return token_logprobs(model, ids, **given, **changes)[0]


def padded(left: bool) -> dict[str, torch.Tensor]:
    width = max(len(one.token_ids) for one in SEQUENCES) + 3
    ids, kinds, mask = (torch.zeros(len(SEQUENCES), width, dtype=torch.long) for _ in range(3))
    for row, one in enumerate(SEQUENCES):
        columns = slice(width - len(one.token_ids), width) if left else slice(0, len(one.token_ids))
        ids[row, columns], kinds[row, columns] = torch.tensor(one.token_ids), torch.tensor(one.kinds)
        mask[row, columns] = 1
    return {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": kinds, **joined(SEQUENCES)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_features_depend_on_the_image_alone(name: str, dtype: torch.dtype) -> None:
    model, given = bound(name, dtype), joined(SEQUENCES)
    threads = torch.get_num_threads()
    together = image_features(model, **given)
    torch.set_num_threads(threads % 2 + 1)
    try:
        counts = given["image_grid_thw"].prod(-1)
        pixels = given["pixel_values"].split(counts.tolist())
        each = [
            image_features(model, part, grid[None]) for part, grid in zip(pixels, given["image_grid_thw"], strict=True)
        ]
    finally:
        torch.set_num_threads(threads)
    assert together.dtype is dtype
    assert torch.equal(together, torch.cat(each))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_bits_of_each_sequence_alone(name: str, dtype: torch.dtype) -> None:
    model = bound(name, dtype)
    with torch.no_grad():
        each = [alone(model, one) for one in SEQUENCES]
        for left in (False, True):
            batch = padded(left)
            together = token_logprobs(model, **batch)
            mask = batch["attention_mask"]
            predicts = (mask[:, 1:] * mask[:, :-1]).bool()
            for row, own in enumerate(each):
                assert torch.equal(together[row][predicts[row]], own)
            logits = model(**batch).logits
            scores = logprobs_from_logits(logits[:, :-1], batch["input_ids"][:, 1:], 1.0)
            for row, own in enumerate(each):
                assert torch.equal(scores[row][predicts[row]], own)
        ids = torch.tensor([[token for one in SEQUENCES for token in one.token_ids]])
        positions = torch.cat([torch.arange(len(one.token_ids)) for one in SEQUENCES])[None]
        packed = token_logprobs(model, ids, position_ids=positions, **joined(SEQUENCES))[0]
        ends = torch.tensor([len(one.token_ids) for one in SEQUENCES]).cumsum(0)
        for end, one, own in zip(ends.tolist(), SEQUENCES, each, strict=True):
            assert torch.equal(packed[end - len(one.token_ids) : end - 1], own)


@pytest.mark.parametrize("name", FAMILIES)
def test_images_matter(name: str) -> None:
    """Other pixels, and pixels of another form, give other log-probabilities of the tokens behind them."""
    model, one = bound(name), SEQUENCES[0]
    other = WithImages(one.token_ids, one.pixel_values.flip(0), one.image_grid_thw)
    turned = WithImages(one.token_ids, one.pixel_values, torch.tensor([[1, 6, 4]]))
    scores = [alone(model, given) for given in (one, other, turned)]
    for changed in scores[1:]:
        assert not torch.equal(changed[-5:], scores[0][-5:])


def oracle_scores(model: PreTrainedModel) -> list[torch.Tensor]:
    """Score each sequence by Hugging Face's own forward."""
    found = []
    for one in SEQUENCES:
        ids = torch.tensor([one.token_ids])
        given = joined([one]) if len(one.image_grid_thw) else {}
        given = {key: part.to(model.dtype) if part.is_floating_point() else part for key, part in given.items()}
        kinds = {"mm_token_type_ids": torch.tensor([one.kinds])} if given else {}
        logits = model(ids, use_cache=False, **given, **kinds).logits[0, :-1]
        found.append(logits.double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_and_gradients_near_float64(name: str) -> None:
    oracle, theirs, mine = make_model_with_images(name).double(), make_model_with_images(name), make_bound(name)
    exact, near = oracle_scores(oracle), oracle_scores(theirs)
    own = [alone(mine, one) for one in SEQUENCES]
    assert relative_error(torch.cat(own), torch.cat(exact)) < 3 * relative_error(torch.cat(near), torch.cat(exact))
    for scores in (exact, near, own):
        loss(scores).backward()
    errors: dict[str, list[float]] = {"mine": [], "theirs": []}
    for key, parameter in oracle.named_parameters():
        assert parameter.grad is not None, key
        for whose, model in (("mine", mine), ("theirs", theirs)):
            errors[whose].append(relative_error(model.get_parameter(key).grad, parameter.grad))
    assert max(errors["mine"]) < 3 * max(errors["theirs"])


def make_bound(name: str) -> PreTrainedModel:
    return bind(make_model_with_images(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_of_images_may_be_given(name: str) -> None:
    model, batch = bound(name), padded(left=True)
    given = {key: batch[key] for key in ("input_ids", "image_grid_thw", "attention_mask", "mm_token_type_ids")}
    three, _ = model.model.get_rope_index(**given)
    text = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = token_logprobs(model, **batch)
        assert torch.equal(token_logprobs(model, **batch, position_ids=three), wanted)
        assert torch.equal(token_logprobs(model, **batch, position_ids=torch.cat([text[None], three])), wanted)
        logits = model(**batch).logits
        assert torch.equal(model(**batch, position_ids=three).logits, logits)
        for wrong in (three + 1, text.expand(3, -1, -1)):
            with pytest.raises(ValueError, match=r"position_ids of the shape .* are not those of these tokens"):
                token_logprobs(model, **batch, position_ids=wrong)
            with pytest.raises(ValueError, match=r"position_ids of the shape .* are not those of these tokens"):
                model(**batch, position_ids=wrong)


def test_a_sampled_placeholder_is_text() -> None:
    model, one = bound("Qwen2"), SEQUENCES[0]
    ids = torch.tensor([[*one.token_ids, IMAGE, 7]])
    kinds = torch.tensor([[*one.kinds, 0, 0]])
    with torch.no_grad():
        scores = token_logprobs(model, ids, mm_token_type_ids=kinds, **joined([one]))[0]
        assert torch.equal(scores[: len(one.token_ids) - 1], alone(model, one))
        with pytest.raises(ValueError, match=r"sequence 0 of the call has 7 tokens of images"):
            token_logprobs(model, ids, **joined([one]))


def test_checkpointing_gives_the_same_gradients() -> None:
    plain, recomputed = make_bound("Qwen2"), make_bound("Qwen2")
    recomputed.train()
    recomputed.gradient_checkpointing_enable()
    for model in (plain, recomputed):
        token_logprobs(model, **padded(left=False)).sum().backward()
    for key, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, recomputed.get_parameter(key).grad), key


def test_where_nothing_is_wanted_the_tower_runs() -> None:
    """Other ranks may wait in its collectives, and in those of its backward."""
    model = make_bound("Qwen2")
    batch = padded(left=False)
    wanted = torch.zeros(len(SEQUENCES), batch["input_ids"].shape[1] - 1, dtype=torch.bool)
    scores = token_scores(model, **batch, wanted=wanted).log_probs
    assert not scores.any()
    scores.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


ONE = {"input_ids": torch.tensor([SEQUENCES[0].token_ids]), **joined([SEQUENCES[0]])}
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no grid": ({"image_grid_thw": None}, ValueError, "images without image_grid_thw"),
    "no pixels": ({"pixel_values": None}, ValueError, "images without pixel_values"),
    "a grid of floats": ({"image_grid_thw": torch.ones(1, 3)}, TypeError, r"image_grid_thw must be .* torch\.float32"),
    "a list": ({"image_grid_thw": [[1, 4, 6]]}, TypeError, r"image_grid_thw must be [^$]* got list"),
    "two numbers": ({"image_grid_thw": torch.ones(1, 2, dtype=torch.long)}, ValueError, r"the shape \[1, 2\]"),
    "an odd grid": ({"image_grid_thw": torch.tensor([[1, 3, 8]])}, ValueError, "multiples of 2"),
    "a video": ({"image_grid_thw": torch.tensor([[2, 4, 6]])}, ValueError, "not videos"),
    "no image": (
        {"pixel_values": torch.ones(0, 96), "image_grid_thw": torch.ones(0, 3, dtype=torch.long)},
        ValueError,
        "image_grid_thw must be .* got none",
    ),
    "sparse pixels": ({"pixel_values": torch.ones(24, 96).to_sparse()}, TypeError, "torch.sparse_coo"),
    "too few patches": ({"pixel_values": torch.ones(23, 96)}, ValueError, r"\[24, 96\].* the shape \[23, 96\]"),
    "pixels of bytes": ({"pixel_values": torch.ones(24, 96, dtype=torch.uint8)}, TypeError, "uint8"),
    "more images": (
        {"pixel_values": torch.ones(48, 96), "image_grid_thw": torch.tensor([[1, 4, 6], [1, 4, 6]])},
        ValueError,
        "has 2 images; the tokens are those of the first 1 alone",
    ),
    "another image": (
        {"pixel_values": torch.ones(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])},
        ValueError,
        r"has 6 tokens of images \(1008\); .* which have \[4\]",
    ),
    "kinds of text": ({"mm_token_type_ids": torch.ones(1, 20, dtype=torch.long)}, ValueError, "marks others than"),
    "kinds of another shape": (
        {"mm_token_type_ids": torch.ones(1, 4, dtype=torch.long)},
        ValueError,
        "must have the shape of input_ids",
    ),
    "kinds alone": (
        {"pixel_values": None, "image_grid_thw": None, "mm_token_type_ids": torch.tensor([SEQUENCES[0].kinds])},
        ValueError,
        "mm_token_type_ids",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_images_are_refused(case: str) -> None:
    changes, error, said = WRONG[case]
    model = bound("Qwen2")
    with pytest.raises(error, match=said):
        token_logprobs(model, **{**ONE, **changes})
    with pytest.raises(error, match=said):
        model(**{**ONE, **changes})


def test_attentions_of_the_config_are_refused_beside_images() -> None:
    model = make_bound("Qwen2")
    model.model.language_model.config.output_attentions = True
    with pytest.raises(ValueError, match=r"output_attentions=True \(of the config\)"):
        model(**ONE)


def test_models_of_text_refuse_images() -> None:
    text, whole = bind(make_model("Qwen2")), bind(make_wrapped("Gemma3"))
    for model in (text, whole):
        assert binding_of(model).images is None
        with pytest.raises(ValueError, match="computes text alone"):
            token_logprobs(model, **ONE)
        with pytest.raises(ValueError, match="computes text alone"):
            image_features(model, **joined([SEQUENCES[0]]))


@pytest.mark.parametrize("sections", [None, [9, 8], [9, 8, 7]], ids=str)
def test_without_sections_images_are_refused(sections: list[int] | None) -> None:
    """Tokens of images would turn as text does, in trainer and worker alike; Hugging Face's class fails there."""
    model = make_model_with_images("Qwen2")
    parameters = model.model.language_model.rotary_emb.config.rope_parameters
    del parameters["mrope_section"]
    parameters |= {} if sections is None else {"mrope_section": sections}
    with pytest.raises(ValueError, match=re.escape(f"mrope_section={sections!r}; allowed: three numbers, 25 together")):
        bind(model)(**ONE)


def test_a_tower_that_is_not_bound_says_why() -> None:
    model = make_model_with_images("Qwen2")
    model.model.visual.merger.mlp[1] = torch.nn.Softplus()
    bind(model)
    with pytest.raises(ValueError, match=re.escape("because visual.merger.mlp.1 is a Softplus")):
        model(**ONE)
    assert len(token_logprobs(model, torch.tensor(token_ids(20)))[0]) == 19
