"""Decoder layers of a hybrid model that a rollout computes in one call, of a Gated DeltaNet mixer or of gated
attention, have the bits of their modules, and give way to who listens."""

from typing import Any

import pytest
import torch
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.delta import layer as delta_layer
from samebit.kernels.binding.layers import attention as attention_layer
from samebit.kernels.layout.layers.call import LayerCall
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from .compare import assert_matches_trainer, assert_same_samples, run
from .families import DTYPES, bound_model, make_model, paired, token_ids
from .listening import listening, one_by_one
from .lora import config_for, make_peft

pytestmark = pytest.mark.usefixtures("rooms_with_an_end")

PROMPTS = token_ids(1, 3, 65, 130)
PARAMS = [
    SamplingParams(n=n, seed=n, max_tokens=new, ignore_eos=True) for n, new in ((1, 20), (2, 40), (5, 12), (9, 8))
]
DENSE = {"mlp_only_layers": [0, 1, 2]}
CASES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "joined": ("Qwen3_5", {}, [5]),
    "joined, experts": ("Qwen3_5Moe", {}, [8]),
    "by key head, experts in two layers": ("Qwen3Next", {}, [7]),
    "by key head, two value heads each": (
        "Qwen3Next",
        {**DENSE, "linear_num_value_heads": 4, "linear_key_head_dim": 20, "linear_value_head_dim": 50},
        [5],
    ),
    "by key head, one value head each": (
        "Qwen3Next",
        {**DENSE, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 9},
        [5],
    ),
}
"""Gives the family of a model, what is changed in it, and how many layers and blocks of experts each call of a step
computes, embedding and head among them.
"""


@pytest.fixture
def layers_in_one_call(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """List the mixers of layers that were computed in one call, and how many rows they had."""
    calls: list[tuple[str, int]] = []

    def count(module: object, name: str) -> None:
        prepare = vars(module)[name]

        def counted(x: torch.Tensor, *arguments: object) -> LayerCall | None:
            call: LayerCall | None = prepare(x, *arguments)
            if call is not None:
                calls.append((name, x.shape[-2]))
            return call

        monkeypatch.setattr(module, name, counted)

    count(delta_layer, "delta_call")
    count(attention_layer, "attention_call")
    return calls


def names_of(model: nn.Module, part: str) -> list[str]:
    """Return the names of the modules called so in the layers of a model."""
    return [name for name, _ in model.named_modules() if name.endswith(f".{part}") and ".layers." in name]


@pytest.mark.parametrize(("case", "dtype"), paired(tuple(CASES), DTYPES))
def test_one_call_gives_the_bits_of_the_modules(
    case: str, dtype: torch.dtype, layers_in_one_call: list[tuple[str, int]], layers_of_calls: list[int]
) -> None:
    family, changes, counts = CASES[case]
    model = bind(make_model(family, dtype, **changes))
    at_once, _ = run(model, PROMPTS, PARAMS)
    assert layers_of_calls == counts * (len(layers_of_calls) // len(counts))
    rows = [rows for _, rows in layers_in_one_call]
    assert min(rows) <= 2
    assert max(rows) > 16  # both kinds of matrix products
    assert {name for name, _ in layers_in_one_call} == {"delta_call", "attention_call"}
    assert_matches_trainer(model, at_once, PARAMS)
    layers_in_one_call.clear()
    again = one_by_one(model, PROMPTS, PARAMS, *names_of(model, "out_proj"), *names_of(model, "o_proj"))
    assert not layers_in_one_call
    assert_same_samples(again, at_once)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("Qwen3_5", "input_layernorm"),
        ("Qwen3_5", "linear_attn"),
        ("Qwen3_5", "linear_attn.in_proj_qkv"),
        ("Qwen3_5", "linear_attn.in_proj_z"),
        ("Qwen3_5", "linear_attn.in_proj_b"),
        ("Qwen3_5", "linear_attn.in_proj_a"),
        ("Qwen3_5", "linear_attn.out_proj"),
        ("Qwen3_5", "mlp"),
        ("Qwen3_5", "mlp.down_proj"),
        ("Qwen3Next", "linear_attn"),
        ("Qwen3Next", "linear_attn.in_proj_qkvz"),
        ("Qwen3Next", "linear_attn.in_proj_ba"),
        ("Qwen3Next", "linear_attn.out_proj"),
    ],
)
def test_who_listens_to_a_part_of_a_layer_hears_each_call(
    family: str, name: str, layers_in_one_call: list[tuple[str, int]]
) -> None:
    model = bound_model(family)
    heard: list[str] = []
    layers = [name.rpartition(".")[0] for name in names_of(model, "mlp")]
    with listening(model, heard, f"{names_of(model, 'linear_attn')[0].rpartition('.')[0]}.{name}"):
        run(model, PROMPTS[1:2], PARAMS[:1])
    assert len(heard) == PARAMS[0].max_tokens
    assert len(layers_in_one_call) == PARAMS[0].max_tokens * (len(layers) - 1)


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), paired(("Qwen3_5", "Qwen3Next"), DTYPES))
def test_one_call_adds_an_adapter_as_the_modules_do(
    family: str, dtype: torch.dtype, layers_in_one_call: list[tuple[str, int]]
) -> None:
    model = bind(make_peft(family, dtype, config_for(family, 5)))
    at_once, _ = run(model, PROMPTS, PARAMS)
    assert {name for name, _ in layers_in_one_call} == {"delta_call", "attention_call"}
    assert_matches_trainer(model, at_once, PARAMS)
    layers_in_one_call.clear()
    again = one_by_one(model, PROMPTS, PARAMS, *names_of(model, "input_layernorm"))
    assert not layers_in_one_call
    assert_same_samples(again, at_once)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "projection"), [("Qwen3_5", "in_proj_a"), ("Qwen3Next", "in_proj_ba")])
def test_a_call_that_is_found_again_sees_what_changed_meanwhile(
    family: str, projection: str, dtype: torch.dtype
) -> None:
    """A call that is found again sees parameters of other numbers that nobody was told of, those of the gates among
    them.
    """
    model = make_model(family, dtype)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)) as worker:
        worker.generate([[5, 6, 7]], params)
        mixer = model.get_submodule(names_of(model, "linear_attn")[0])
        names = "A_log", "dt_bias", "conv1d.weight", "norm.weight", f"{projection}.weight"
        for place, name in enumerate(names):
            with torch.no_grad():
                mixer.get_parameter(name).mul_(1.5)
            again = worker.generate([[15 + place, 16, 17]], params)
            assert_matches_trainer(model, again, [params])
