"""Rotary scalings that look at a whole call, ``longrope`` and ``dynamic``, are exact where none of its positions lies
behind those that they leave alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from samebit.kernels import bind, token_logprobs
from samebit.kernels.binding.families.inexact import exact_positions
from samebit.kernels.binding.modules import RotaryFacts
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.errors import ModelLoadError

from .compare import assert_matches_trainer
from .families import MAX_LEN, bound_model, make_model, make_wrapped, token_ids
from .gradients import hugging_face, relative_error
from .layouts import LAYOUTS, alone, assert_same_bits

FIRST = 40


def longrope(pairs: int, first: int = FIRST) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.2 * pair for pair in range(pairs)],
        "long_factor": [9.0] * pairs,
        "original_max_position_embeddings": first,
    }


def by_layer_type(**sets: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": longrope(16), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, **sets}


def dynamic(factor: float = 2.0) -> dict[str, Any]:
    return {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": factor}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi3": ("Phi3, longrope", {"original_max_position_embeddings": FIRST}),
    "layers in one call": ("Llama", {"head_dim": 32, "rope_parameters": longrope(16)}),
    "global layers alone": ("Gemma3", {"head_dim": 32, "rope_parameters": by_layer_type()}),
    "dynamic": ("Qwen2", {"max_position_embeddings": FIRST, "rope_parameters": dynamic()}),
    "dynamic, global layers alone": (
        "Gemma3",
        {
            "head_dim": 32,
            "max_position_embeddings": FIRST,
            "rope_parameters": by_layer_type(full_attention=dynamic()),
        },
    ),
}


def made(kind: str) -> PreTrainedModel:
    name, changes = MODELS[kind]
    return make_model(name, **changes)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return bind(made(request.param))


@pytest.mark.parametrize("kind", MODELS)
def test_all_positions_up_to_the_limit_are_near_hugging_face(kind: str) -> None:
    sequences = token_ids(FIRST, 3, FIRST - 1)
    with torch.no_grad():
        found = alone(bind(made(kind)), sequences)
        exact = hugging_face(made(kind).double(), sequences)
    assert relative_error(torch.cat(found), torch.cat(exact)) < 5e-7


def test_the_longest_sequence_and_one_token_more(model: PreTrainedModel) -> None:
    refused = rf"a sequence of {FIRST + 1} tokens; of a model with \w+ rotary scaling the first {FIRST} positions"
    longest, longer = (torch.tensor(token_ids(length)) for length in (FIRST, FIRST + 1))
    packed = torch.tensor(token_ids(FIRST + 10)), torch.tensor([[*range(FIRST), *range(10)]])
    with torch.no_grad():
        rows = token_logprobs(model, longest)
        assert torch.equal(token_logprobs(model, packed[0], position_ids=packed[1])[:, : rows.shape[1]], rows)
        with pytest.raises(ValueError, match=refused):
            token_logprobs(model, longer)
        padding = torch.tensor([[0] * 9 + [1] * (FIRST + 1)])
        with pytest.raises(ValueError, match=refused):
            model(torch.tensor(token_ids(FIRST + 10)), attention_mask=padding)
        padded = LAYOUTS["left padded"](model, token_ids(FIRST, 7))
        assert_same_bits(padded, alone(model, token_ids(FIRST, 7)))


def test_a_worker_ends_where_the_exact_positions_do(model: PreTrainedModel, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=None, seed=3, ignore_eos=True)
    prompts = token_ids(FIRST - 1, 20, 3)
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        with RolloutWorker(source) as worker:
            assert worker.limits.max_model_len == FIRST
            outputs = worker.generate(prompts, params)
            assert [len(one.prompt_token_ids) + len(one.samples[0].token_ids) for one in outputs] == [FIRST] * 3
            assert_matches_trainer(model, outputs, [params] * 3)
        with pytest.raises(ModelLoadError, match=rf"max_model_len={FIRST + 1} is more than .* {FIRST} positions"):
            RolloutWorker(source, config=RolloutConfig(max_model_len=FIRST + 1))


@pytest.mark.parametrize("kind", ["Phi3", "dynamic"])
def test_an_update_keeps_the_limit_and_brings_the_trainers_bits(kind: str, tmp_path: Path) -> None:
    """An update keeps the limit and brings the trainer's bits: frequencies are no weights."""
    made(kind).save_pretrained(tmp_path)
    trainer = bind(made(kind))
    with torch.no_grad():
        for weight in trainer.parameters():
            weight.mul_(1.25)
    params = [SamplingParams(max_tokens=8, seed=1, ignore_eos=True)] * 2
    with RolloutWorker(tmp_path, config=RolloutConfig(num_blocks=32)) as worker:
        for update in (worker.receive_weights, lambda source: worker.load_state_dict(source.state_dict())):
            update(trainer)
            assert worker.limits.max_model_len == FIRST
            assert_matches_trainer(trainer, worker.generate(token_ids(3, FIRST - 8), params), params)


def test_the_limit_is_the_least_of_all_layers() -> None:
    parameters = by_layer_type(sliding_attention=longrope(16, FIRST - 1))
    limit = exact_positions(None, make_model("Gemma3", head_dim=32, rope_parameters=parameters).config.to_dict())
    assert limit is not None
    assert (limit.count, limit.scaling, limit.key) == (FIRST - 1, "longrope", "original_max_position_embeddings")
    parameters = by_layer_type(sliding_attention=dynamic())
    model = make_model("Gemma3", head_dim=32, max_position_embeddings=FIRST - 2, rope_parameters=parameters)
    limit = exact_positions(None, model.config.to_dict())
    assert limit is not None
    assert (limit.count, limit.scaling, limit.key) == (FIRST - 2, "dynamic", "max_position_embeddings")
    assert exact_positions(None, bound_model("Llama, rope yarn").config.to_dict()) is None


def test_a_workers_error_names_the_scaling_where_it_ends_before_the_model() -> None:
    told = rf"the model's {FIRST} positions that are exact under its longrope rotary scaling \(original_max_position_em"
    with pytest.raises(ModelLoadError, match=told):
        RolloutWorker(bind(made("Phi3")), config=RolloutConfig(max_model_len=MAX_LEN))


@pytest.mark.parametrize(("factor", "positions"), [(2.0, FIRST), (1.1, FIRST + 1), (4.7, FIRST + 7)])
def test_dynamic_frequencies_are_those_that_hugging_face_has_up_to_the_last_position(
    factor: float, positions: int
) -> None:
    model = make_model("Qwen2", max_position_embeddings=positions, rope_parameters=dynamic(factor))
    with torch.no_grad():
        model(torch.tensor(token_ids(positions)))
        found = frequencies(model)
        model(torch.tensor(token_ids(positions + 1)))
        assert not torch.equal(frequencies(model), found)
    facts = vars(bind(model).model.rotary_emb)["samebit"]
    assert isinstance(facts, RotaryFacts)
    assert torch.equal(facts.frequencies[""], found)


def frequencies(model: PreTrainedModel) -> torch.Tensor:
    return model.get_submodule("model.rotary_emb").get_buffer("inv_freq").clone()


def test_internvl_3_with_the_scaling_as_its_folders_write_it(tmp_path: Path) -> None:
    model = bind(make_wrapped("Qwen2 in InternVL", max_position_embeddings=FIRST, rope_parameters=dynamic()))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config["text_config"].pop("rope_parameters")
    scaling = {"rope_scaling": {"factor": rope["factor"], "rope_type": "dynamic", "type": "dynamic"}}
    config["text_config"] |= {**scaling, "rope_theta": rope["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    params = SamplingParams(max_tokens=None, seed=3, ignore_eos=True)
    for source in (model, tmp_path):
        with RolloutWorker(source) as worker:
            assert worker.limits.max_model_len == FIRST
            outputs = worker.generate(token_ids(FIRST - 1, 20, 3), params)
            assert_matches_trainer(model, outputs, [params] * 3)
