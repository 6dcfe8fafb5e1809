"""A decoder layer that a rollout computes in one call has the bits of its modules, and gives way to who listens."""

import pytest
import torch
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.layers import attention as attention_layer
from samebit.kernels.layout.layers.call import LayerCall
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams

from ..campaign import in_turns
from .compare import assert_matches_trainer, assert_same_samples, run
from .families import DTYPES, SHORT_CONVS, bound_model, make_model, paired, token_ids
from .listening import listening, one_by_one
from .lora import SMALLER, config_for, lora_config, make_peft

pytestmark = pytest.mark.usefixtures("rooms_with_an_end")

PROMPTS = token_ids(1, 3, 65, 130)
PARAMS = [
    SamplingParams(n=n, seed=n, max_tokens=new, ignore_eos=True) for n, new in ((1, 16), (2, 12), (5, 12), (9, 8))
]
SUMS = ("Gemma2", "Gemma3", "Olmo2", "Olmo3", "Exaone4", "Glm4", "Granite")
"""Lists those that add norms of what attention and MLP give, or multiples of it."""
OTHERS = ("Phi3", "HunYuanDenseV1", "StableLm")
"""Lists those with other weights or norms than Llama's."""
FAMILIES = (
    *("Llama", "Qwen2", "Qwen3", "Mistral", "SmolLM3", "Glm", "Ernie4_5", "Arcee", "Gemma"),
    *(*SUMS, "Glm4, as inside of GLM-4.1V", "Olmoe", "MiniMaxM2", "GptOss"),
    *(*OTHERS, "Phi3, a part of the head rotated", "Phi3, longrope", *SHORT_CONVS),
)
ADAPTED = ("Qwen3", "Gemma2", "Olmo2", "Glm4", "Granite", *OTHERS, "Lfm2")
PARTS = (
    *(("Qwen3", name) for name in ("input_layernorm", "self_attn", "self_attn.k_norm", "self_attn.o_proj", "mlp")),
    *(("Gemma2", f"{name}_layernorm") for name in ("post_attention", "pre_feedforward", "post_feedforward")),
    *(("Olmo2", name) for name in ("self_attn.q_norm", "post_attention_layernorm", "post_feedforward_layernorm")),
    *(("Glm4", name) for name in ("post_self_attn_layernorm", "mlp.gate_up_proj", "post_mlp_layernorm")),
    *(("HunYuanDenseV1", f"self_attn.{name}_layernorm") for name in ("query", "key")),
    *(("StableLm", name) for name in ("input_layernorm", "post_attention_layernorm", "dropout")),
    *(("Phi3", name) for name in ("self_attn.qkv_proj", "resid_attn_dropout")),
)
"""Lists parts of layers, each kind of norm among them."""


@pytest.fixture
def layers_in_one_call(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List how many rows each layer had that was computed in one call."""
    rows: list[int] = []
    prepare = attention_layer.attention_call

    def counted(x: torch.Tensor, *arguments: object) -> LayerCall | None:
        call = prepare(x, *arguments)
        if call is not None:
            rows.append(x.shape[-2])
        return call

    monkeypatch.setattr(attention_layer, "attention_call", counted)
    return rows


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), paired(FAMILIES, DTYPES))
def test_one_call_gives_the_bits_of_the_modules(family: str, dtype: torch.dtype, layers_in_one_call: list[int]) -> None:
    model = bound_model(family, dtype)
    at_once, _ = run(model, PROMPTS, PARAMS)
    assert min(layers_in_one_call) == 1
    assert max(layers_in_one_call) > 16  # both kinds of matrix products
    assert_matches_trainer(model, at_once, PARAMS)
    layers_in_one_call.clear()
    first, *others = [name for name, _ in model.named_modules() if name.endswith(".self_attn")]
    out = "out_proj" if family in SHORT_CONVS else "o_proj"
    again = one_by_one(model, PROMPTS, PARAMS, f"{first}.{out}", *others)
    assert not layers_in_one_call
    assert_same_samples(again, at_once)


@pytest.mark.parametrize(("family", "name"), PARTS)
def test_who_listens_to_a_part_of_a_layer_hears_each_call(
    family: str, name: str, layers_in_one_call: list[int]
) -> None:
    model = bound_model(family)
    heard: list[str] = []
    with listening(model, heard, f"model.layers.1.{name}"):
        run(model, PROMPTS[1:2], PARAMS[:1])
    assert len(heard) == PARAMS[0].max_tokens
    assert len(layers_in_one_call) == PARAMS[0].max_tokens  # those of the other layer


def test_a_layer_hears_of_its_own_hooks(layers_of_calls: list[int]) -> None:
    model = bound_model("Qwen3")
    heard: list[str] = []
    with listening(model, heard, "model.layers.1"):
        run(model, PROMPTS[1:2], PARAMS[:1])
    assert len(heard) == PARAMS[0].max_tokens
    assert layers_of_calls == [1] * (2 * PARAMS[0].max_tokens)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3_5", "SmolLM3", *SUMS, "Gemma", *OTHERS])
def test_all_layers_of_a_step_are_one_call_where_nobody_listens(family: str, layers_of_calls: list[int]) -> None:
    """All layers of a step are one call where nobody listens, also those of attention and of Gated DeltaNet in one
    model, or of layers that rotate and that do not, wherever their norms are.
    """
    model = bound_model(family)
    at_once, _ = run(model, PROMPTS[1:2], PARAMS[:1])
    layers = len(model.get_submodule("model.layers"))  # type: ignore[arg-type]
    assert layers_of_calls == [layers + 2] * PARAMS[0].max_tokens  # embedding and head among them
    assert_same_samples(one_by_one(model, PROMPTS[1:2], PARAMS[:1], "model.layers.1"), at_once)


@pytest.mark.parametrize("part", ["operator_norm", "self_attn.k_layernorm", "self_attn.out_proj", "feed_forward.w3"])
def test_who_listens_to_a_layer_between_short_convolutions_hears_each_call(
    part: str, layers_in_one_call: list[int]
) -> None:
    model = bound_model("Lfm2")
    at_once, _ = run(model, PROMPTS[1:2], PARAMS[:1])
    assert len(layers_in_one_call) == PARAMS[0].max_tokens
    layers_in_one_call.clear()
    again = one_by_one(model, PROMPTS[1:2], PARAMS[:1], f"model.layers.1.{part}")
    assert not layers_in_one_call
    assert_same_samples(again, at_once)


def test_the_model_alone_does_not_go_through_an_adapter_whose_layers_were_one_call_before() -> None:
    model = bind(make_peft("Qwen3"))
    run(model, PROMPTS[1:2], PARAMS[:1])
    with model.disable_adapter():
        alone, _ = run(model, PROMPTS[1:2], PARAMS[:1])
        assert_matches_trainer(model, alone, PARAMS[:1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_that_changed_between_two_steps_are_read(dtype: torch.dtype, layers_in_one_call: list[int]) -> None:
    model = make_model("GptOss", dtype)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)) as worker:
        before = worker.generate([[5, 6, 7]], params)
        attention = model.get_submodule("model.layers.1.self_attn")
        with torch.no_grad():
            attention.get_parameter("sinks").add_(4.0)
        after = worker.generate([[5, 6, 8], [5, 6, 7, 9]], [params] * 2)
        assert_matches_trainer(model, after, [params] * 2)
        attention.sinks = nn.Parameter(attention.get_parameter("sinks").detach() - 8.0)
        assert_matches_trainer(model, worker.generate([[5, 6, 8, 1]], params), [params])
        assert before[0].samples[0].logprobs != after[0].samples[0].logprobs
    assert len(layers_in_one_call) == 2 * 3 * params.max_tokens


def test_a_weight_of_queries_keys_and_values_that_changed_between_two_steps_is_read(layers_of_calls: list[int]) -> None:
    model = make_model("Phi3")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)) as worker:
        before = worker.generate([[5, 6, 7]], params)
        joined = model.get_submodule("model.layers.1.self_attn.qkv_proj")
        joined.weight.data = joined.weight.data * 2  # torch does not count it
        after = worker.generate([[5, 6, 8], [5, 6, 7, 9]], [params] * 2)
        assert_matches_trainer(model, after, [params] * 2)
        joined.weight = nn.Parameter(joined.weight.detach() / 2)
        assert_matches_trainer(model, worker.generate([[5, 6, 8, 1]], params), [params])
        assert before[0].samples[0].logprobs != after[0].samples[0].logprobs
    layers = len(model.get_submodule("model.layers"))  # type: ignore[arg-type]
    assert set(layers_of_calls) == {layers + 2}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "targets", "dtype"),
    [
        (family, targets, dtype)
        for (family, targets), dtype in in_turns(
            [("Qwen3", ["q_proj", "v_proj", "down_proj"]), *((family, None) for family in ADAPTED)], DTYPES
        )
    ],
)
def test_one_call_adds_an_adapter_as_the_modules_do(
    family: str, targets: list[str] | None, dtype: torch.dtype, layers_in_one_call: list[int]
) -> None:
    config = config_for(family, 5) if targets is None else lora_config(17, target_modules=targets)
    model = bind(make_peft(family, dtype, config))
    at_once, _ = run(model, PROMPTS, PARAMS)
    assert min(layers_in_one_call) == 1
    assert max(layers_in_one_call) > 16
    assert_matches_trainer(model, at_once, PARAMS)
    layers_in_one_call.clear()
    layers = "base_model.model.model.layers"
    heard = ["1.feed_forward.w2"] if family == "Lfm2" else ["0.mlp.down_proj", "1.self_attn"]
    again = one_by_one(model, PROMPTS, PARAMS, *(f"{layers}.{name}" for name in heard))
    assert not layers_in_one_call
    assert_same_samples(again, at_once)


def test_a_loaded_adapter_and_the_model_alone_are_one_call_each(layers_in_one_call: list[int]) -> None:
    trainer = bind(make_peft("Qwen3"))
    tensors = {key: tensor for key, tensor in trainer.state_dict().items() if ".default." in key}
    adapted = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, adapter="policy")
    alone = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    with RolloutWorker(make_model("Qwen3", **SMALLER["Qwen3"])) as worker:
        worker.load_adapter("policy", tensors, config=trainer.peft_config["default"])
        through = worker.generate(PROMPTS[1:3], adapted)
        assert len(layers_in_one_call) >= 2 * (adapted.max_tokens - 1)  # the first step finds out what to multiply
        assert_matches_trainer(trainer, through, [adapted] * 2)
        layers_in_one_call.clear()
        base = worker.generate(PROMPTS[1:3], alone)
        assert len(layers_in_one_call) >= 2 * alone.max_tokens
        layers_in_one_call.clear()
        mixed = worker.generate(PROMPTS[1:3], [adapted, alone])
        assert_same_samples(mixed, [through[0], base[1]])
    with trainer.disable_adapter():
        assert_matches_trainer(trainer, base, [alone] * 2)


def test_a_call_that_is_found_again_sees_what_changed_meanwhile() -> None:
    """A call that is found again sees what changed meanwhile: a hook, a weight of other numbers that nobody was told
    of, and a weight that is another tensor.
    """
    model = make_model("Qwen3")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with RolloutWorker(model, config=RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)) as worker:
        worker.generate([[5, 6, 7]], params)
        heard: list[str] = []
        with listening(model, heard, "model.layers.0.mlp.up_proj"):
            worker.generate([[15, 16, 17]], params)
        assert len(heard) == 4
        up = model.get_submodule("model.layers.1.mlp.up_proj")
        up.weight.data = up.weight.data * 2  # torch does not count it
        assert_matches_trainer(model, worker.generate([[25, 26, 27]], params), [params])
        down = model.get_submodule("model.layers.0.mlp.down_proj")
        down.weight = nn.Parameter(down.weight.detach() * 2)
        assert_matches_trainer(model, worker.generate([[35, 36, 37]], params), [params])


def test_a_forward_that_is_replaced_between_two_steps_runs_from_then_on() -> None:
    model = make_model("Qwen3")
    heard: list[int] = []
    with RolloutWorker(model, config=RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)) as worker:
        norm = model.get_submodule("model.layers.0.post_attention_layernorm")
        own = norm.forward

        def replaced(x: torch.Tensor) -> torch.Tensor:
            heard.append(1)
            return own(x)

        worker.after_steps(lambda: setattr(norm, "forward", replaced))
        worker.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert heard


@pytest.mark.parametrize(("family", "part"), [("Granite", "mlp"), ("GraniteMoeShared", "shared_mlp")])
def test_a_factor_of_a_layer_that_changed_between_two_steps_counts(family: str, part: str) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def sampled(factor: float, *names: str) -> list[RequestOutput]:
        model = make_model(family)
        layer = model.get_submodule("model.layers.1")
        config = RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)
        with listening(model, [], *names), RolloutWorker(model, config=config) as worker:
            worker.after_steps(lambda: setattr(layer, "residual_multiplier", factor))
            return worker.generate([[5, 6, 7]], params)

    at_once = sampled(0.25)
    assert_same_samples(sampled(0.25, f"model.layers.1.{part}"), at_once)
    assert at_once[0].samples[0].logprobs[1:] != sampled(0.5)[0].samples[0].logprobs[1:]
