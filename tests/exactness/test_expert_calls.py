"""A block of routed experts that a rollout computes in the call of its layer has the bits of its modules, and gives way
to who listens."""

import pytest
import torch
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.layers import one_call
from samebit.kernels.binding.layers.known import KnownCall
from samebit.kernels.layout.layers.call import LayerCall
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from ..campaign import CAMPAIGN
from .compare import assert_matches_trainer, assert_same_samples, run
from .families import DTYPES, bound_model, make_model, paired, token_ids
from .listening import listening, one_by_one

pytestmark = pytest.mark.usefixtures("rooms_with_an_end")

PROMPTS = token_ids(1, 3, 65, 130)
PARAMS = [
    SamplingParams(n=n, seed=n, max_tokens=new, ignore_eos=True) for n, new in ((1, 16), (2, 12), (5, 12), (9, 8))
]
FAMILIES = (
    "Qwen3Moe",
    "Mixtral",
    "Glm4Moe",
    "Qwen3Next",
    "DeepseekV2",
    "GraniteMoeShared",
    "HunYuanMoEV1",
    "GptOss",
    *(("GraniteMoe", "Qwen2Moe", "Dots1", "SolarOpen", "Ernie4_5_Moe") if CAMPAIGN else ()),
)
SHARED = "shared_expert", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate"


@pytest.fixture
def blocks_in_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List how many rows each block had that was computed in the call of its layer."""
    rows: list[int] = []
    prepare = one_call.block_call

    def counted(x: torch.Tensor, *arguments: object) -> LayerCall | None:
        call = prepare(x, *arguments)
        if call is not None:
            rows.append(x.shape[-2])
        return call

    monkeypatch.setattr(one_call, "block_call", counted)
    return rows


def routers_of(model: nn.Module) -> list[str]:
    """Return the names of the routers."""
    ends = ".mlp.gate", ".mlp.router", ".block_sparse_moe.router"
    return [name for name, _ in model.named_modules() if name.endswith(ends)]


def blocks_of(model: nn.Module) -> list[str]:
    """Return the names of the blocks of experts."""
    return [name.rpartition(".")[0] for name in routers_of(model)]


@pytest.mark.parametrize(("family", "dtype"), paired(FAMILIES, DTYPES))
def test_one_call_gives_the_bits_of_the_modules(family: str, dtype: torch.dtype, blocks_in_calls: list[int]) -> None:
    model = bound_model(family, dtype)
    at_once, _ = run(model, PROMPTS, PARAMS)
    assert min(blocks_in_calls) <= 2
    assert max(blocks_in_calls) > 16  # both kinds of matrix products
    assert_matches_trainer(model, at_once, PARAMS)
    blocks_in_calls.clear()
    again = one_by_one(model, PROMPTS, PARAMS, *routers_of(model))
    assert not blocks_in_calls
    assert_same_samples(again, at_once)


@pytest.mark.parametrize("family", ["Qwen3Next", "Glm4Moe"])
def test_one_call_takes_routers_in_float32(family: str, blocks_in_calls: list[int]) -> None:
    """Loading keeps the routers of some classes in float32, whatever the dtype of the model is."""
    model = make_model(family, torch.bfloat16)
    of_float32 = make_model(family).state_dict()
    for name in (f"{name}.weight" for name in routers_of(model)):
        model.get_parameter(name).data = of_float32[name]
    at_once, _ = run(bind(model), PROMPTS, PARAMS)
    assert min(blocks_in_calls) <= 2
    assert max(blocks_in_calls) > 16
    assert_matches_trainer(model, at_once, PARAMS)
    blocks_in_calls.clear()
    again = one_by_one(model, PROMPTS, PARAMS, *routers_of(model))
    assert not blocks_in_calls
    assert_same_samples(again, at_once)


@pytest.mark.parametrize("part", ["", "gate", "experts", *SHARED])
def test_who_listens_to_a_part_of_a_block_hears_each_call(part: str, blocks_in_calls: list[int]) -> None:
    model = bound_model("Qwen3Next")
    first, *others = blocks_of(model)
    heard: list[str] = []
    with listening(model, heard, f"{first}.{part}".rstrip(".")):
        run(model, PROMPTS[1:2], PARAMS[:1])
    assert len(heard) == PARAMS[0].max_tokens
    assert len(blocks_in_calls) == PARAMS[0].max_tokens * len(others)


@pytest.mark.parametrize(
    ("family", "part"),
    [
        *(("GraniteMoeShared", f"block_sparse_moe{part}") for part in ("", ".router")),
        *(("GraniteMoeShared", f"shared_mlp{part}") for part in ("", ".input_linear")),
        *(("GptOss", f"mlp{part}") for part in ("", ".router", ".experts")),
    ],
)
def test_who_listens_behind_attention_in_one_call_hears_each_call(
    family: str, part: str, blocks_in_calls: list[int]
) -> None:
    model = bound_model(family)
    at_once, _ = run(model, PROMPTS[1:2], PARAMS[:1])
    blocks_in_calls.clear()
    again = one_by_one(model, PROMPTS[1:2], PARAMS[:1], f"model.layers.0.{part}")
    assert len(blocks_in_calls) == PARAMS[0].max_tokens  # those of the other layer
    assert_same_samples(again, at_once)


def test_who_asks_for_the_experts_of_a_token_has_the_routers_called(blocks_in_calls: list[int]) -> None:
    model = bind(make_model("Qwen3Moe"))
    asked = SamplingParams(max_tokens=4, seed=1, ignore_eos=True, return_routed_experts=True)
    outputs, _ = run(model, PROMPTS[1:2], [asked])
    assert outputs[0].samples[0].routed_experts is not None
    assert not blocks_in_calls


def test_a_call_that_is_found_again_sees_what_changed_meanwhile(blocks_in_calls: list[int]) -> None:
    """A call that is found again sees parameters of other numbers that nobody was told of, and a correction that is
    another tensor.
    """
    model = make_model("Glm4Moe")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)) as worker:
        worker.generate([[5, 6, 7]], params)
        block = model.get_submodule(blocks_of(model)[0])
        names = "gate.weight", "experts.gate_up_proj", "experts.down_proj", "shared_experts.up_proj.weight"
        for place, name in enumerate(names):
            with torch.no_grad():
                block.get_parameter(name).mul_(1.5)
            assert_matches_trainer(model, worker.generate([[15 + place, 16, 17]], params), [params])
        router = block.get_submodule("gate")
        router.e_score_correction_bias = torch.randn_like(router.get_buffer("e_score_correction_bias"))
        assert_matches_trainer(model, worker.generate([[25, 26, 27]], params), [params])
    assert blocks_in_calls


def test_a_weight_of_gate_and_up_that_changed_between_two_steps_is_read(blocks_in_calls: list[int]) -> None:
    model = make_model("GraniteMoeShared")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)) as worker:
        worker.generate([[5, 6, 7]], params)
        joined = model.get_submodule("model.layers.1.shared_mlp.input_linear")
        joined.weight.data = joined.weight.data * 2  # torch does not count it
        assert_matches_trainer(model, worker.generate([[15, 16, 17]], params), [params])
        joined.weight = nn.Parameter(joined.weight.detach() / 3)
        assert_matches_trainer(model, worker.generate([[25, 26, 27]], params), [params])
    assert len(blocks_in_calls) == 2 * 3 * params.max_tokens


def test_what_a_call_was_made_of_is_not_found_again_with_another_correction() -> None:
    model = bind(make_model("Glm4Moe"))
    block = blocks_of(model)[0]
    known = KnownCall.of(model.get_submodule(block.removesuffix(".mlp")), None, [])
    assert known.holds()
    router = model.get_submodule(f"{block}.gate")
    router.e_score_correction_bias = router.get_buffer("e_score_correction_bias").clone()
    assert not known.holds()


def test_experts_of_torchs_gelu_are_called(blocks_in_calls: list[int]) -> None:
    model = bind(make_model("Qwen3Moe", hidden_act="gelu"))
    outputs, _ = run(model, PROMPTS[:2], PARAMS[:2])
    assert_matches_trainer(model, outputs, PARAMS[:2])
    assert not blocks_in_calls
