"""Decoder layers of a hybrid model that a rollout computes in one call each, of a Gated DeltaNet mixer or of gated
attention, have the bits of their modules, and give way to who listens."""

import pytest
import torch
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.delta import layer as delta_layer
from samebit.kernels.binding.dense import layer as dense_layer
from samebit.kernels.layout.layers.call import LayerCall
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from .compare import assert_matches_trainer, assert_same_samples, run
from .families import CAMPAIGN, DTYPES, bound_model, make_model, paired, token_ids
from .listening import listening
from .lora import config_for, make_peft

PROMPTS = token_ids(1, 3, 65, 130)
PARAMS = [
    SamplingParams(n=n, seed=n, max_tokens=new, ignore_eos=True) for n, new in ((1, 20), (2, 40), (5, 12), (9, 8))
]
FAMILIES = ("Qwen3_5", "Qwen3_5Moe")


@pytest.fixture
def layers_in_one_call(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool]]:
    """The mixers of layers that were computed in one call, how many rows they had, and whether their MLP was in it."""
    calls: list[tuple[str, int, bool]] = []

    def count(module: object, name: str) -> None:
        prepare = vars(module)[name]

        def counted(x: torch.Tensor, *arguments: object) -> LayerCall | None:
            call: LayerCall | None = prepare(x, *arguments)
            if call is not None:
                calls.append((name, x.shape[-2], not call.apart))
            return call

        monkeypatch.setattr(module, name, counted)

    count(delta_layer, "delta_call")
    count(dense_layer, "dense_call")
    return calls


def names_of(model: nn.Module, part: str) -> list[str]:
    """The names of the modules called so in the layers of a model."""
    return [name for name, _ in model.named_modules() if name.endswith(f".{part}") and ".layers." in name]


@pytest.mark.parametrize(("family", "dtype"), paired(FAMILIES, DTYPES))
def test_one_call_gives_the_bits_of_the_modules(
    family: str, dtype: torch.dtype, layers_in_one_call: list[tuple[str, int, bool]]
) -> None:
    model = bound_model(family, dtype)
    at_once, _ = run(model, PROMPTS, PARAMS)
    rows = [rows for _, rows, _ in layers_in_one_call]
    assert min(rows) <= 2
    assert max(rows) > 16  # both kinds of matrix products
    assert {name for name, _, _ in layers_in_one_call} == {"delta_call", "dense_call"}
    assert {whole for _, _, whole in layers_in_one_call} == {family == "Qwen3_5"}  # of experts the input
    assert_matches_trainer(model, at_once, PARAMS)
    layers_in_one_call.clear()
    heard: list[str] = []
    with listening(model, heard, *names_of(model, "out_proj"), *names_of(model, "o_proj")):
        one_by_one, _ = run(model, PROMPTS, PARAMS)
    assert heard
    assert not layers_in_one_call
    assert_same_samples(one_by_one, at_once)


@pytest.mark.parametrize(
    "name",
    [
        "input_layernorm",
        "linear_attn",
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
        "linear_attn.out_proj",
        "mlp",
        "mlp.down_proj",
    ],
)
def test_who_listens_to_a_part_of_a_layer_hears_each_call(
    name: str, layers_in_one_call: list[tuple[str, int, bool]]
) -> None:
    model = bound_model("Qwen3_5")
    heard: list[str] = []
    layers = [name.rpartition(".")[0] for name in names_of(model, "mlp")]
    with listening(model, heard, f"{names_of(model, 'linear_attn')[0].rpartition('.')[0]}.{name}"):
        run(model, PROMPTS[1:2], PARAMS[:1])
    assert len(heard) == PARAMS[0].max_tokens
    assert len(layers_in_one_call) == PARAMS[0].max_tokens * (len(layers) - 1)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES if CAMPAIGN else DTYPES[:1])
def test_one_call_adds_an_adapter_as_the_modules_do(
    dtype: torch.dtype, layers_in_one_call: list[tuple[str, int, bool]]
) -> None:
    model = bind(make_peft("Qwen3_5", dtype, config_for("Qwen3_5", 5)))
    at_once, _ = run(model, PROMPTS, PARAMS)
    assert {name for name, _, _ in layers_in_one_call} == {"delta_call", "dense_call"}
    assert_matches_trainer(model, at_once, PARAMS)
    layers_in_one_call.clear()
    heard: list[str] = []
    with listening(model, heard, *names_of(model, "mlp")):
        one_by_one, _ = run(model, PROMPTS, PARAMS)
    assert not layers_in_one_call
    assert_same_samples(one_by_one, at_once)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_that_is_found_again_sees_what_changed_meanwhile(dtype: torch.dtype) -> None:
    """Parameters of other numbers that nobody was told of, those of the gates among them."""
    model = make_model("Qwen3_5", dtype)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)) as worker:
        worker.generate([[5, 6, 7]], params)
        mixer = model.get_submodule(names_of(model, "linear_attn")[0])
        for place, name in enumerate(("A_log", "dt_bias", "conv1d.weight", "norm.weight", "in_proj_a.weight")):
            with torch.no_grad():
                mixer.get_parameter(name).mul_(1.5)
            again = worker.generate([[15 + place, 16, 17]], params)
            assert_matches_trainer(model, again, [params])
