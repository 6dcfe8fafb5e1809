"""A layer whose rows go through several adapters, or through matrices in bfloat16, is one call with their bits."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from peft import PeftModel

from samebit.kernels import bind
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from ..campaign import in_turns
from ..patience import HANG
from .compare import assert_matches_trainer, assert_same_samples, run
from .families import CAMPAIGN, DTYPES, make_model, token_ids
from .listening import listening, one_by_one
from .lora import SMALLER, add, config_for, lora_config, make_peft, wake

pytestmark = pytest.mark.usefixtures("rooms_with_an_end")

PROMPTS = token_ids(1, 65, 3, 130, 2, 31, 17)
NAMES = ("default", "some", None, "own", "default", None, "some")
"""Names the adapter of each prompt: the rows of no adapter are neighbours."""

PARAMS = [
    SamplingParams(max_tokens=7 + 2 * seed, seed=seed, ignore_eos=True, adapter=name) for seed, name in enumerate(NAMES)
]
RANKS = (1, 5, 17, 100) if CAMPAIGN else (1, 17)
FAMILIES = ("Qwen3", "Gemma2", "Glm4", "Granite", "Phi3", "HunYuanDenseV1", "StableLm", "Qwen3_5", "DeepseekV3")


def several(family: str, dtype: torch.dtype) -> PeftModel:
    """Return a bound trainer with three adapters: on all layers, on some, and with matrices of the model's dtype."""
    model = make_peft(family, dtype, config_for(family, 5))
    layers = {"q_proj", "o_proj", "down_proj", "q_a_proj"} & set(config_for(family, 1).target_modules or ())
    add(model, "some", lora_config(17, lora_alpha=9, target_modules=layers))
    model.add_adapter("own", config_for(family, 1), autocast_adapter_dtype=False)
    wake(model, "own", seed=2)
    return bind(model)


def serving(trainer: PeftModel, family: str, dtype: torch.dtype, **config: object) -> RolloutWorker:
    """Return a worker on the model without adapters that has loaded those of the trainer."""
    worker = RolloutWorker(make_model(family, dtype, **SMALLER.get(family, {})), config=RolloutConfig(**config))
    for name, its in trainer.peft_config.items():
        worker.load_adapter(name, tensors(trainer, name), config=its, autocast=name != "own")
    return worker


def tensors(model: PeftModel, name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in model.state_dict().items() if f".{name}." in key}


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), in_turns(FAMILIES, DTYPES))
def test_rows_of_several_adapters_have_the_bits_of_each(
    family: str, dtype: torch.dtype, layers_of_calls: list[int]
) -> None:
    trainer = several(family, dtype)
    with serving(trainer, family, dtype, enable_prefix_caching=False) as worker:
        worker.generate(PROMPTS, PARAMS)  # finds out what to multiply
        layers_of_calls.clear()
        found = worker.generate(PROMPTS, PARAMS)
        assert sum(layers_of_calls) >= PARAMS[0].max_tokens * len(trainer.base_model.model.model.layers)
    for name in dict.fromkeys(NAMES):
        places = [place for place, other in enumerate(NAMES) if other == name]
        outputs, asked = [found[place] for place in places], [PARAMS[place] for place in places]
        if name is None:
            with trainer.disable_adapter():
                assert_matches_trainer(trainer, outputs, asked)
        else:
            trainer.set_adapter(name)
            assert_matches_trainer(trainer, outputs, asked)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_few_rows_of_two_adapters(count: int, layers_of_calls: list[int]) -> None:
    """A few rows of each of two adapters are those of a step of each alone, also where a layer is not one call."""
    trainer = several("Qwen3", torch.bfloat16)
    prompts = PROMPTS[:1] * (2 * count)
    asked = [replace(PARAMS[0], seed=place, adapter=("own", "some")[place % 2]) for place in range(2 * count)]
    with serving(trainer, "Qwen3", torch.bfloat16, enable_prefix_caching=False) as worker:
        alone = [worker.generate(prompts[place::2], asked[place::2]) for place in range(2)]
        layers_of_calls.clear()
        mixed = worker.generate(prompts, asked)
        assert layers_of_calls
        assert_same_samples(mixed, [alone[place % 2][place // 2] for place in range(2 * count)])
        layers_of_calls.clear()
        names = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
        with listening(worker.module, [], *names):
            apart = worker.generate(prompts, asked)
        assert not layers_of_calls
        assert_same_samples(apart, mixed)


def test_steps_through_adapters_are_one_call(layers_of_calls: list[int]) -> None:
    """Steps of a worker on the trainer's model are one call from embedding to head, through one adapter or several."""
    model = make_peft("Qwen3", config=config_for("Qwen3", 3))
    add(model, "ref", lora_config(5, target_modules=["v_proj"]))
    with RolloutWorker(bind(model), config=RolloutConfig(enable_prefix_caching=False)) as worker:
        for names in (("default",) * 3, ("__base__",) * 3, ("default", "ref", "__base__")):
            layers_of_calls.clear()
            found = worker.generate(PROMPTS[:3], [replace(PARAMS[0], adapter=name) for name in names])
            assert layers_of_calls[-3:] == [2 + 2] * 3
            for place, name in enumerate(names):
                alone = worker.generate(PROMPTS[place : place + 1], replace(PARAMS[0], adapter=name))
                assert_same_samples(found[place : place + 1], alone)


def test_an_update_reaches_steps_of_several_adapters() -> None:
    model = make_peft("Qwen3", config=config_for("Qwen3", 3))
    add(model, "ref", lora_config(5, target_modules=["v_proj"]))
    asked = [replace(one, adapter=name) for one, name in zip(PARAMS, ("default", "ref", "default"), strict=False)]
    with RolloutWorker(bind(model), config=RolloutConfig(enable_prefix_caching=False)) as worker:
        before = worker.generate(PROMPTS[:3], asked)
        with worker.weight_update():
            wake(model, seed=3)
        found = worker.generate(PROMPTS[:3], asked)
    assert_same_samples(found[1:2], before[1:2])
    assert found[0].samples[0].logprobs != before[0].samples[0].logprobs
    assert_matches_trainer(model, found[::2], asked[::2])


def test_nothing_is_left_of_an_adapter_whose_rows_were_beside_those_of_another() -> None:
    trainer = several("Qwen3", torch.float32)
    asked = [replace(PARAMS[0], adapter=name) for name in ("default", "some")]
    with serving(trainer, "Qwen3", torch.float32) as worker:
        loaded = worker._adapters.registry.loaded("some")
        weights = [weakref.ref(side.weight) for one in loaded.adapter.deltas.values() for side in (one.down, one.up)]
        del loaded
        gc.disable()
        try:
            worker.generate(PROMPTS[:2], asked)
            worker.drop_adapter("some")
            worker.generate(PROMPTS[:1], asked[0])  # behind the last step through both
            assert [weight() for weight in weights] == [None] * len(weights)
        finally:
            gc.enable()


@pytest.mark.parametrize("rank", RANKS)
def test_matrices_of_the_models_dtype_are_added_in_the_layers_call(rank: int, layers_of_calls: list[int]) -> None:
    config = config_for("Qwen3", rank)
    model = bind(make_peft("Qwen3", torch.bfloat16, config, autocast_adapter_dtype=False))
    prompts, asked = [*PROMPTS, *token_ids(300)], [replace(one, adapter=None) for one in (*PARAMS, PARAMS[0])]
    at_once, _ = run(model, prompts, asked)
    assert sum(layers_of_calls) >= 2 * (PARAMS[0].max_tokens - 1)
    assert_matches_trainer(model, at_once, asked)
    layers_of_calls.clear()
    layers = "base_model.model.model.layers"
    again = one_by_one(model, prompts, asked, f"{layers}.0.mlp.down_proj", f"{layers}.1.self_attn")
    assert not layers_of_calls
    assert_same_samples(again, at_once)


def test_versions_of_an_adapter_in_flight_are_rows_of_one_call(layers_of_calls: list[int]) -> None:
    """Requests that have begun go on under the version of then, in the calls of those that go through the new one."""
    trainer = several("Qwen3", torch.float32)
    long = replace(PARAMS[0], max_tokens=60, adapter="default")
    with serving(trainer, "Qwen3", torch.float32, enable_prefix_caching=False) as worker:
        (old,) = worker.generate(PROMPTS[1:2], long)
        begun = worker.submit(PROMPTS[1], long)
        next(iter(begun))
        worker.pause()
        wake(trainer, seed=8)
        worker.load_adapter("default", tensors(trainer, "default"))
        second = worker.submit(PROMPTS[1], long)
        third = worker.submit(PROMPTS[2], replace(long, adapter="some"))
        layers_of_calls.clear()
        worker.resume()
        assert_same_samples([begun.result(HANG)], [old])
        new, other = second.result(HANG), third.result(HANG)
        assert sum(layers_of_calls) >= 2 * (long.max_tokens - 2)
    assert new.samples[0].logprobs != old.samples[0].logprobs
    assert_matches_trainer(trainer, [new], [long])
    trainer.set_adapter("some")
    assert_matches_trainer(trainer, [other], [long])


def test_a_hook_on_a_matrix_is_heard_in_steps_of_several_adapters(layers_of_calls: list[int]) -> None:
    model = make_peft("Qwen3", config=config_for("Qwen3", 3))
    add(model, "ref", lora_config(5, target_modules=["v_proj"]))
    bind(model)
    asked = [replace(PARAMS[0], adapter=name) for name in ("default", "ref", "__base__")]
    with RolloutWorker(model, config=RolloutConfig(enable_prefix_caching=False)) as worker:
        before = worker.generate(PROMPTS[:3], asked)
        up = model.get_submodule("base_model.model.model.layers.0.self_attn.v_proj.lora_B.ref")
        layers_of_calls.clear()
        handle = up.register_forward_hook(lambda module, inputs, out: out * 2)
        found = worker.generate(PROMPTS[:3], asked)
        assert len(layers_of_calls) == PARAMS[0].max_tokens  # those of the other layer
        handle.remove()
        assert_same_samples([found[0], found[2]], [before[0], before[2]])
        assert found[1].samples[0].logprobs != before[1].samples[0].logprobs
        assert_same_samples(worker.generate(PROMPTS[:3], asked), before)
