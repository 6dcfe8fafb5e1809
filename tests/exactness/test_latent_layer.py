"""A decoder layer of attention over latents that a rollout computes in one call has the bits of its modules, and gives
way to who listens."""

from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.layers import latent as latent_layer
from samebit.kernels.layout.layers.call import LayerCall
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from .compare import assert_matches_trainer, assert_same_samples, run
from .families import CAMPAIGN, DTYPES, bound_model, make_model, paired, token_ids
from .listening import listening, one_by_one
from .lora import PROJECTIONS, config_for, lora_config, make_peft, wake

pytestmark = pytest.mark.usefixtures("rooms_with_an_end")

PROMPTS = token_ids(1, 3, 65, 130)
PARAMS = [
    SamplingParams(n=n, seed=n, max_tokens=new, ignore_eos=True) for n, new in ((1, 16), (2, 12), (5, 12), (9, 8))
]
FAMILIES = ("DeepseekV3", "DeepseekV3, whole queries, rope yarn", "DeepseekV2", "Glm4MoeLite")


@pytest.fixture
def layers_in_one_call(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """List how many rows each layer had that was computed in one call, and whether its MLP was in it."""
    calls: list[tuple[int, bool]] = []
    prepare = latent_layer.latent_call

    def counted(x: torch.Tensor, *arguments: Any) -> LayerCall | None:
        call = prepare(x, *arguments)
        if call is not None:
            calls.append((x.shape[-2], not call.apart))
        return call

    monkeypatch.setattr(latent_layer, "latent_call", counted)
    return calls


@pytest.mark.parametrize(("family", "dtype"), paired(FAMILIES, DTYPES))
def test_one_call_gives_the_bits_of_the_modules(
    family: str, dtype: torch.dtype, layers_in_one_call: list[tuple[int, bool]]
) -> None:
    model = bound_model(family, dtype)
    at_once, _ = run(model, PROMPTS, PARAMS)
    rows = [rows for rows, _ in layers_in_one_call]
    assert min(rows) == 1
    assert max(rows) > 16  # both kinds of matrix products
    assert {whole for _, whole in layers_in_one_call} == {True, False}  # a layer of experts, and one without
    assert_matches_trainer(model, at_once, PARAMS)
    layers_in_one_call.clear()
    again = one_by_one(model, PROMPTS, PARAMS, "model.layers.0.self_attn.kv_b_proj", "model.layers.1.self_attn")
    assert not layers_in_one_call
    assert_same_samples(again, at_once)


@pytest.mark.parametrize("experts", [False, True])
def test_layers_and_the_experts_behind_them_are_one_call(experts: bool, layers_of_calls: list[int]) -> None:
    """Six layers and the experts behind the last four of them, or none, are one call."""
    model = make_model("DeepseekV3", num_hidden_layers=6, first_k_dense_replace=2 if experts else 6)
    samples, _ = run(bind(model), PROMPTS, PARAMS)
    assert layers_of_calls[:4] == [12 if experts else 8] * 4  # embedding and head among them
    assert_matches_trainer(model, samples, PARAMS)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("input_layernorm", 1),
        ("self_attn", 1),
        ("self_attn.q_b_proj", 1),
        ("self_attn.q_a_layernorm", 1),
        ("self_attn.kv_a_layernorm", 1),
        ("self_attn.kv_b_proj", 2),
        ("self_attn.o_proj", 1),
        ("mlp", 1),
        ("mlp.up_proj", 1),
    ],
)
def test_who_listens_to_a_part_of_a_layer_hears_each_call(
    name: str, calls: int, layers_in_one_call: list[tuple[int, bool]]
) -> None:
    model = bound_model("DeepseekV3")
    heard: list[str] = []
    with listening(model, heard, f"model.layers.0.{name}"):
        run(model, PROMPTS[1:2], PARAMS[:1])
    assert len(heard) == calls * PARAMS[0].max_tokens
    assert len(layers_in_one_call) == PARAMS[0].max_tokens  # those of the other layer


def test_who_listens_to_experts_hears_each_call_behind_the_layers(layers_in_one_call: list[tuple[int, bool]]) -> None:
    model = bound_model("DeepseekV3")
    heard: list[str] = []
    with listening(model, heard, "model.layers.1.mlp", "model.layers.1"):
        run(model, PROMPTS[1:2], PARAMS[:1])
    assert len(heard) == 2 * PARAMS[0].max_tokens
    assert len(layers_in_one_call) == 2 * PARAMS[0].max_tokens


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES if CAMPAIGN else DTYPES[:1])
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_one_call_adds_an_adapter_as_the_modules_do(
    family: str, dtype: torch.dtype, layers_in_one_call: list[tuple[int, bool]]
) -> None:
    config = config_for("DeepseekV3", 5)
    model = bind(make_peft(family, dtype, config))
    at_once, _ = run(model, PROMPTS, PARAMS)
    rows = [rows for rows, _ in layers_in_one_call]
    assert min(rows) == 1
    assert max(rows) > 16
    assert_matches_trainer(model, at_once, PARAMS)
    layers_in_one_call.clear()
    layers = "base_model.model.model.layers"
    again = one_by_one(model, PROMPTS, PARAMS, f"{layers}.0.self_attn.o_proj", f"{layers}.1.self_attn")
    assert not layers_in_one_call
    assert_same_samples(again, at_once)


def test_an_adapter_on_the_mlp_of_dense_layers(layers_in_one_call: list[tuple[int, bool]]) -> None:
    config = lora_config(5, target_modules=[*PROJECTIONS, "gate_proj", "up_proj", "down_proj"])
    model = get_peft_model(make_model("DeepseekV3", first_k_dense_replace=2), config)
    wake(model)
    samples, _ = run(bind(model), PROMPTS, PARAMS)
    assert {whole for _, whole in layers_in_one_call} == {True}
    assert_matches_trainer(model, samples, PARAMS)


def test_blocks_of_one_token_and_followers(layers_in_one_call: list[tuple[int, bool]]) -> None:
    """Keys of blocks of one token go where the block table says, row by row; a follower writes nothing again that is
    shared.
    """
    model = bound_model("DeepseekV3", torch.bfloat16)
    prompts = [*PROMPTS, [*PROMPTS[-1][:100], 5, 7], PROMPTS[-1]]
    wanted = [SamplingParams(max_tokens=6, seed=number, ignore_eos=True) for number in range(len(prompts))]
    for block_size in (1, 16):
        config = RolloutConfig(block_size=block_size, max_num_seqs=4, max_num_batched_tokens=24)
        with RolloutWorker(model, config=config) as worker:
            cold, warm = (worker.generate(prompts, wanted) for _ in range(2))
        assert_same_samples(warm, cold)
        assert_matches_trainer(model, warm, wanted)
    assert layers_in_one_call


def test_a_call_that_is_found_again_sees_what_changed_meanwhile(
    layers_in_one_call: list[tuple[int, bool]],
) -> None:
    """A call that is found again sees what changed: a hook in a layer of experts, a weight of other numbers that nobody
    was told of, and one that is another tensor, in a layer with a gated MLP and in one of experts.
    """
    model = make_model("DeepseekV3")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)) as worker:
        worker.generate([[5, 6, 7]], params)
        assert len(layers_in_one_call) == 8
        heard: list[str] = []
        with listening(model, heard, "model.layers.1.self_attn.q_b_proj"):
            worker.generate([[15, 16, 17]], params)
        assert (len(heard), len(layers_in_one_call)) == (4, 12)
        for layer in (0, 1):
            norm = model.get_submodule(f"model.layers.{layer}.self_attn.kv_a_layernorm")
            norm.weight.data = norm.weight.data * 2  # torch does not count it
            assert_matches_trainer(model, worker.generate([[25, 26, 27 + layer]], params), [params])
            expansion = model.get_submodule(f"model.layers.{layer}.self_attn.kv_b_proj")
            expansion.weight = nn.Parameter(expansion.weight.detach() * 2)
            assert_matches_trainer(model, worker.generate([[35, 36, 37 + layer]], params), [params])
