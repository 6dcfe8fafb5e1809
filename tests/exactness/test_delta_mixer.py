"""A Gated DeltaNet layer that a rollout computes in one call has the bits of its operations, and gives way to who
listens."""

import pytest
import torch

from samebit.kernels import bind
from samebit.kernels.binding.delta import mixer
from samebit.rollout import SamplingParams

from .compare import assert_matches_trainer, assert_same_samples, run
from .families import DTYPES, bound_model, token_ids
from .lora import config_for, make_peft

PROMPTS = token_ids(1, 3, 65, 130)
PARAMS = [
    SamplingParams(n=n, seed=n, max_tokens=new, ignore_eos=True) for n, new in ((1, 20), (2, 40), (5, 12), (9, 8))
]
FAMILIES = ("Qwen3_5", "Qwen3_5Moe")


@pytest.fixture
def layers_in_one_call(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each layer had that was computed in one call."""
    rows: list[int] = []
    compute = mixer.delta_mixer

    def counted(x: torch.Tensor, *arguments: object) -> torch.Tensor | None:
        out = compute(x, *arguments)
        if out is not None:
            rows.append(len(x))
        return out

    monkeypatch.setattr(mixer, "delta_mixer", counted)
    return rows


def mixer_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(vars(module).get("samebit"), mixer.DeltaFacts)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_gives_the_bits_of_the_operations(
    family: str, dtype: torch.dtype, layers_in_one_call: list[int]
) -> None:
    model = bound_model(family, dtype)
    at_once, _ = run(model, PROMPTS, PARAMS)
    assert min(layers_in_one_call) <= 2
    assert max(layers_in_one_call) > 16  # both kinds of matrix products
    assert_matches_trainer(model, at_once, PARAMS)
    layers_in_one_call.clear()
    heard: list[object] = []
    handles = [layer.out_proj.register_forward_hook(lambda *_: heard.append(_)) for layer in mixer_layers(model)]
    one_by_one, _ = run(model, PROMPTS, PARAMS)
    for handle in handles:
        handle.remove()
    assert heard
    assert not layers_in_one_call
    assert_same_samples(one_by_one, at_once)


@pytest.mark.parametrize("name", ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"])
def test_who_listens_to_a_projection_hears_each_call(name: str, layers_in_one_call: list[int]) -> None:
    model = bound_model("Qwen3_5")
    heard: list[object] = []
    first, *others = mixer_layers(model)
    handle = first.get_submodule(name).register_forward_hook(lambda *_: heard.append(name))
    run(model, PROMPTS[1:2], PARAMS[:1])
    handle.remove()
    assert len(heard) == PARAMS[0].max_tokens
    assert len(layers_in_one_call) == PARAMS[0].max_tokens * len(others)


def test_layers_with_an_adapter_are_called_part_by_part(layers_in_one_call: list[int]) -> None:
    model = bind(make_peft("Qwen3_5", torch.float32, config_for("Qwen3_5", 5)))
    samples, _ = run(model, PROMPTS[1:3], PARAMS[:2])
    assert not layers_in_one_call
    assert_matches_trainer(model, samples, PARAMS[:2])
