"""Nothing changes with what a caller has made torch's default dtype or device: trainers set them and leave them set."""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from samebit.kernels import bind, image_features, logprobs_from_logits, token_logprobs
from samebit.kernels.binding.modules import RotaryFacts
from samebit.kernels.binding.trainer.training import token_scores
from samebit.kernels.layout.transfer import Staging, sent
from samebit.kernels.ops.logprobs import entropy_from_logits
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from .families import SPARSE, bound_model, make_model, token_ids
from .images import joined, make_model_with_images, with_images


@pytest.fixture
def narrow() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def scored(model: PreTrainedModel) -> list[torch.Tensor]:
    """Bind the model; return log-probabilities, and the gradients of all parameters."""
    scores = token_logprobs(bind(model), torch.tensor(token_ids(7)))
    parameters = [part for part in model.parameters() if part.requires_grad]
    return [scores, *torch.autograd.grad(scores.sum(), parameters, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("name", ["FalconH1", "Qwen3Next", "GptOss"])
def test_sums_stay_float32(name: str, request: pytest.FixtureRequest) -> None:
    model = make_model(name, torch.float32)
    expected = scored(copy.deepcopy(model))
    request.getfixturevalue("narrow")
    assert all(torch.equal(one, other) for one, other in zip(scored(model), expected, strict=True))


@pytest.mark.usefixtures("narrow")
def test_a_worker_answers_as_ever() -> None:
    wanted = SamplingParams(max_tokens=3, seed=1, logprobs=2, prompt_logprobs=2, top_p=0.9)
    with RolloutWorker(make_model("Qwen3", torch.bfloat16), config=RolloutConfig(max_model_len=64)) as worker:
        [output] = worker.generate(token_ids(7), wanted)
    assert len(output.prompt_top_logprobs or []) == 7
    assert len(output.samples[0].logprobs) == 3


@pytest.mark.parametrize("name", ["Gemma2", "FalconH1", "Qwen3Next", "GptOss", "StableLm", "DeepseekV3", *SPARSE[:1]])
def test_a_model_on_the_host_is_computed_there(name: str) -> None:
    """Torch computes its own there too; kernels that are given an address of another device end the process."""
    model, found = bind(make_model(name, torch.float32)), []
    ids = torch.tensor(token_ids(70))
    for device in ("cpu", "meta"):
        with torch.device(device):
            scores = token_logprobs(model, ids)
            scores.sum().backward()
        found.append([scores, *(part.grad for part in model.parameters() if part.grad is not None)])
        model.zero_grad()
    assert len(found[0]) > 10
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_logits_on_the_host_are_scored_there() -> None:
    model, ids = bound_model("Qwen3"), torch.tensor(token_ids(9, 9))
    logits, found = torch.randn(9, 50), []
    for device in ("cpu", "meta"):
        given = logits.clone().requires_grad_()
        with torch.device(device):
            scores = token_scores(model, ids, temperature=0.7, with_entropy=True)
            values = [logprobs_from_logits(given, ids[0] % 50, 0.7), entropy_from_logits(given)]
            sum(value.sum() for value in values).backward()
        found.append([scores["log_probs"], scores["entropy"], *values, given.grad])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_angles_are_those_of_the_host() -> None:
    """Angles are computed on the host whatever the default device: a GPU's powers are other numbers, and a worker in
    another process, without this default, would turn otherwise.
    """
    model = make_model("Llama, rope yarn", torch.float32)
    with torch.device("meta"):
        bind(model)
    facts = next(part.__dict__["samebit"] for name, part in model.named_modules() if name.endswith("rotary_emb"))
    assert isinstance(facts, RotaryFacts)
    again = bind(make_model("Llama, rope yarn", torch.float32)).model.rotary_emb.__dict__["samebit"]
    assert all(torch.equal(part, again.frequencies[kind]) for kind, part in facts.frequencies.items())


def test_what_goes_to_a_device_begins_on_the_host() -> None:
    cpu = torch.device("cpu")
    with torch.device("meta"):
        assert sent({"rows": np.arange(3)}, cpu)["rows"].tolist() == [0, 1, 2]
        assert Staging(3, cpu).memory.is_cpu


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_images_have_the_same_features(name: str, request: pytest.FixtureRequest) -> None:
    model, image = bind(make_model_with_images(name)), joined([with_images([(4, 6)], 1)])
    expected = image_features(model, **image)
    with torch.device("meta"):
        assert torch.equal(image_features(model, **image), expected)
    grids = image["image_grid_thw"].to(torch.uint8)
    request.getfixturevalue("narrow")
    assert torch.equal(image_features(model, image["pixel_values"], grids), expected)
