"""`bind` refuses by name and leaves no trace, and a bound model refuses what it can not do."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DataCollatorWithFlattening

from samebit.kernels import BindingError, bind, token_logprobs
from samebit.kernels.binding.binding import binding_of, is_bound
from samebit.kernels.binding.families.family import RECURRENT_MASKS
from samebit.kernels.cpu import operations
from samebit.kernels.layout.forward_context import training_context, use_context

from .families import (
    DELTAS,
    FAMILIES,
    HYBRIDS,
    LATENTS,
    SHORT_CONVS,
    SPARSE,
    VOCAB,
    bound_model,
    make_model,
    token_ids,
)

TINY = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 40,
    "long_factor": [2.0] * 40,
    "original_max_position_embeddings": 1.5,
}


EVERY_FAMILY = (*FAMILIES, *LATENTS, *SPARSE, *HYBRIDS, *DELTAS, *SHORT_CONVS)
MAMBA, ATTENTION = "(mamba|linear_attention)", "(full_)?attention"
"""Names these layers as configs did before transformers 5.13, and as they do since."""
GRANITES = f"{MAMBA}, (attention, )?full_attention"


def of_family(name: str, **config: Any) -> Callable[[], nn.Module]:
    classes = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    return lambda: classes[1](classes[0](**config))


def llama_with(module: nn.Module, path: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = make_model("Llama")
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)
        return model

    return make


def hybrid_with(name: str, module: nn.Module) -> nn.Module:
    model = make_model("NemotronH")
    setattr(model.model.layers[0].mixer, name, module)
    return model


def with_tensor(name: str, path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a model of which one parameter or buffer is another one."""
    model = make_model(name)
    parent, _, leaf = path.rpartition(".")
    holder = model.get_submodule(parent)
    with torch.no_grad():
        value = change({**dict(holder.named_parameters()), **dict(holder.named_buffers())}[leaf])
    setattr(holder, leaf, nn.Parameter(value) if leaf in dict(holder.named_parameters()) else value)
    return model


def with_attribute(name: str, path: str, **attributes: Any) -> nn.Module:
    """Return a model of which one module has other attributes."""
    model = make_model(name)
    for key, value in attributes.items():
        setattr(model.get_submodule(path), key, value)
    return model


CONVOLUTION_BIAS = {
    "NemotronH": "use_conv_bias",
    "Bamba": "mamba_conv_bias",
    "GraniteMoeHybrid": "mamba_conv_bias",
    "FalconH1": "mamba_conv_bias",
    "Zamba2": "use_conv_bias",
    "Mamba2": "use_conv_bias",
}
"""Names the config's key, by family."""


def with_convolution_bias(name: str, bias: nn.Parameter | None) -> nn.Module:
    """Return a hybrid model whose first convolution has this bias, whatever its config says."""
    model = make_model(name)
    next(module for module in model.modules() if isinstance(module, nn.Conv1d)).bias = bias
    return model


class Adapter(nn.Linear):
    """Is a linear layer that does something more in its forward."""


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sinks": (
        lambda: with_attribute("Llama", "model.layers.1.self_attn", sinks=nn.Parameter(torch.zeros(4))),
        r"attention sinks \(model\.layers\.1\.self_attn\.sinks\)",
    ),
    "OPT": (of_family("OPT", **TINY), "OPT.*no known family; dropout"),
    "experts": (
        of_family("Phimoe", **TINY, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1),
        r"Phimoe.*no known family; routed experts \(num_local_experts=2\)",
    ),
    "Bloom": (of_family("Bloom", vocab_size=50, hidden_size=16, n_layer=1, n_head=2), "Bloom.*no known family"),
    "MPT": (of_family("Mpt", vocab_size=50, d_model=16, n_layers=1, n_heads=2), "Mpt.*no known family"),
    "dynamic rotary without a whole number of positions": (
        lambda: make_model(
            "Llama",
            max_position_embeddings=1,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
        r"Llama.*dynamic rotary scaling with max_position_embeddings=1 \(exact: an integer from 2 on\)",
    ),
    "longrope without a number of positions": (
        lambda: make_model("Llama", rope_parameters=LONGROPE),
        r"longrope rotary scaling with original_max_position_embeddings=1\.5 in rope_parameters \(exact: an integer",
    ),
    "dropout": (lambda: make_model("Qwen2", attention_dropout=0.1), r"attention_dropout=0\.1; exact: 0\.0"),
    "float16": (lambda: make_model("Llama").half(), "torch.float16"),
    "float64": (lambda: make_model("Llama").double(), "torch.float64"),
    "activation": (lambda: make_model("Llama", hidden_act="relu"), "activation 'relu'"),
    "attention that looks ahead": (
        lambda: make_model("Qwen3", is_causal=False),
        r"bidirectional attention \(is_causal=False; exact: True\)",
    ),
    "parallel residual": (lambda: make_model("StableLm", use_parallel_residual=True), "parallel residual"),
    "qk LayerNorm": (lambda: make_model("StableLm", qk_layernorm=True), "qk_layernorm"),
    "a wrapped layer": (
        llama_with(Adapter(200, 320), "model.layers.1.self_attn.q_proj"),
        r"layers\.1.*q_proj.*Adapter",
    ),
    "a wrapped head": (llama_with(Adapter(200, VOCAB), "lm_head"), "lm_head.*Adapter"),
    "active dropout": (llama_with(nn.Dropout(0.1), "model.layers.0.resid_dropout"), "Dropout"),
    "experts of Nemotron-H, none of them routed": (
        lambda: make_model("NemotronH, experts", n_routed_experts=0, n_group=1, topk_group=1),
        r"NemotronH: model\.layers\.1\.mixer: 4 experts are chosen of 0",
    ),
    "more choices than experts": (lambda: make_model("Mixtral", num_experts_per_tok=4), "4 experts are chosen of 3"),
    "groups that do not divide the experts": (lambda: make_model("Glm4Moe", n_group=4), "2 of 4 groups of 15 experts"),
    "a router's random factors": (
        lambda: make_model("Mixtral", router_jitter_noise=0.1),
        r"router_jitter_noise=0\.1; exact: 0\.0",
    ),
    "clamped queries": (lambda: make_model("Olmoe", clip_qkv=8.0), r"clip_qkv=8\.0; exact: None"),
    "a rounded correction": (
        lambda: make_model("Glm4Moe").to(torch.bfloat16),
        r"layers\.1\.mlp\.gate\.e_score_correction_bias is torch\.bfloat16; exact is torch\.float32.*from_pretrained",
    ),
    "experts of other processes": (
        lambda: with_attribute("Qwen3Moe", "model.layers.2.mlp.experts", _is_expert_parallel=True),
        r"Qwen3Moe: model\.layers\.2\.mlp\.experts is expert-parallel.*Load the model without",
    ),
    "a part of the experts": (
        lambda: with_tensor("Qwen3Moe", "model.layers.2.mlp.experts.down_proj", lambda weight: weight[:5].clone()),
        r"model\.layers\.2\.mlp chooses among 15 experts, and the module holds 5.*Load all experts",
    ),
    "a router of another class": (
        lambda: with_attribute("Olmoe", "model.layers.0.mlp", gate=nn.Linear(200, 15, bias=False)),
        r"Olmoe: model\.layers\.0\.mlp\.gate is a Linear, which is not bound exactly; known: \['OlmoeTopKRouter'\]",
    ),
    "experts of another class": (
        lambda: with_attribute("Olmoe", "model.layers.0.mlp", experts=nn.Linear(2, 2)),
        r"mlp\.experts is a Linear, which is not bound exactly",
    ),
    "something beside the experts": (
        lambda: with_attribute("Olmoe", "model.layers.0.mlp", extra=Adapter(2, 2)),
        r"model\.layers\.0\.mlp\.extra is a Adapter",
    ),
    "a mixer's activation": (lambda: hybrid_with("act", nn.Tanh()), r"mixer\.act is a Tanh"),
    "a mixer's norm": (lambda: hybrid_with("norm", nn.RMSNorm(240)), r"mixer\.norm is a RMSNorm"),
    "a mixer's convolution": (
        lambda: hybrid_with("conv1d", nn.Conv1d(440, 440, 4, groups=440)),
        "not a depthwise causal",
    ),
    **{
        f"no convolution bias in {name}": (
            lambda name=name: with_convolution_bias(name, None),
            rf"conv1d\.bias is None, but the config says {key}=True",
        )
        for name, key in CONVOLUTION_BIAS.items()
    },
    "a convolution bias that the config denies": (
        lambda: with_convolution_bias(
            "NemotronH, one group, no convolution bias", nn.Parameter(torch.zeros(9 * 24 + 2 * 129))
        ),
        r"layers\.0\.mixer\.conv1d\.bias is a parameter, but the config says use_conv_bias=False",
    ),
    "a layer of another kind": (
        lambda: make_model("GraniteMoeHybrid", layer_types=["mamba", "sliding_attention"]),
        rf"'sliding_attention' \(layer types given: {MAMBA}, sliding_attention; allowed: {GRANITES}\)",
    ),
    "a layer of Falcon-H1's in Granite": (
        lambda: make_model("GraniteMoeHybrid", layer_types=["mamba", "hybrid"]),
        rf"layers of type 'hybrid' \(layer types given: hybrid, {MAMBA}; allowed: {GRANITES}\)",
    ),
    "a layer of experts in Granite": (
        lambda: make_model("GraniteMoeHybrid", layer_types=["mamba", "moe"]),
        rf"layers of type 'moe'.*given: {MAMBA}, moe; allowed: {GRANITES}",
    ),
    "plain attention in Zamba2": (
        lambda: make_model("Zamba2", layers_block_type=["mamba", "attention", "hybrid", "hybrid"]),
        rf"layers of type '{ATTENTION}'.*given: {ATTENTION}, hybrid, {MAMBA}; allowed: {MAMBA}, hybrid",
    ),
    "no hybrid layer in Zamba2": (
        lambda: make_model("Zamba2", layers_block_type=["mamba"] * 4),
        rf"no layer of type 'hybrid'.*given: {MAMBA}; allowed: {MAMBA}, hybrid",
    ),
    "no shared blocks in Zamba2": (
        lambda: make_model("Zamba2", layers_block_type=["mamba"] * 4, num_mem_blocks=0),
        "no layer of type 'hybrid'",
    ),
    "chunked attention": (
        lambda: make_model("Qwen3", layer_types=["full_attention", "chunked_attention"]),
        "layers of type 'chunked_attention'",
    ),
    "the activation of a Gated DeltaNet layer": (
        lambda: make_model("Qwen3Next", hidden_act="gelu"),
        r"Qwen3Next: model\.layers\.0\.linear_attn has the activation 'gelu' \(exact: silu\)",
    ),
    "value heads that share no whole number of key heads": (
        lambda: make_model("Qwen3_5", linear_num_key_heads=4),
        r"linear_attn has DeltaShape\(key_heads=4, value_heads=6, .*allowed: .*key heads that divide value heads",
    ),
    "the convolution of a Gated DeltaNet layer": (
        lambda: with_attribute("Qwen3_5", "model.layers.0.linear_attn", conv1d=nn.Conv1d(380, 380, 4, groups=380)),
        r"linear_attn\.conv1d is Conv1d.*not a depthwise causal convolution without a bias of 380 channels and 4 taps",
    ),
    "the norm of a Gated DeltaNet layer": (
        lambda: with_attribute("OlmoHybrid", "model.layers.0.linear_attn", o_norm=nn.RMSNorm(100)),
        r"linear_attn\.o_norm is a RMSNorm",
    ),
    "windows of no token": (
        lambda: make_model("Qwen2Moe", use_sliding_window=False, layer_types=["sliding_attention"] * 3),
        r"Qwen2Moe: sliding_window=0, where nothing is seen; allowed: None, above 0",
    ),
    "sliding windows beside Gated DeltaNet": (
        lambda: make_model("Qwen3_5", layer_types=["linear_attention", "sliding_attention", "full_attention"]),
        "layers of type 'sliding_attention' .*allowed: linear_attention, full_attention",
    ),
    "an embedding that writes": (
        lambda: with_attribute("Llama", "model.embed_tokens", max_norm=1.0),
        r"model\.embed_tokens has max_norm=1\.0, which writes to its weight in each forward",
    ),
    "another state dtype": (
        lambda: make_model("NemotronH", mamba_ssm_cache_dtype="bfloat16"),
        "a state that is not float32",
    ),
    "not Hugging Face": (lambda: nn.Linear(2, 2), "not a Hugging Face model"),
}


def assert_refused(model: nn.Module, message: str) -> None:
    """Check that a model is refused by name, and left as it was."""
    before = {key: dict(module.__dict__) for key, module in model.named_modules()}
    with pytest.raises(BindingError, match=message):
        bind(model)
    assert not is_bound(model)
    assert {key: dict(module.__dict__) for key, module in model.named_modules()} == before


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_and_left_as_it_was(name: str) -> None:
    make, message = REFUSED[name]
    assert_refused(make(), message)


@pytest.mark.skipif(RECURRENT_MASKS, reason="transformers 5.13 and later can run this layout")
def test_a_layout_of_zamba2_that_hugging_face_can_not_run_is_refused() -> None:
    model = make_model("Zamba2", layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], num_mem_blocks=2)
    with pytest.raises(RuntimeError, match="must match the size"):
        model(torch.ones(1, 3, dtype=torch.int64))
    assert_refused(model, "layer 1 has no adapter of its own")


@pytest.mark.filterwarnings("ignore:`.*` is deprecated:FutureWarning")  # names of caches, since transformers 5.24
def test_a_bound_model_refuses_what_it_would_get_wrong() -> None:
    model, ids = bound_model("Llama"), torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="keeps no Hugging Face cache"):
        model(ids, past_key_values=transformers.DynamicCache())
    for part in (model, model.model):
        with pytest.raises(ValueError, match=r"keeps no Hugging Face cache \(cache\): generate with"):
            part(ids, cache=transformers.DynamicCache())
    with pytest.raises(ValueError, match="RolloutWorker"):
        model.generate(ids, max_new_tokens=2)
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match=r"shape of input_ids, \(1, 4\), got \(1, 5\).*keeps none: generate with"):
        model(ids, attention_mask=torch.ones(1, 5))
    assert model(ids, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match=r"keeps no Hugging Face cache \(cache(_params)?\): generate with"):
        bound_model("Mamba2")(ids, cache_params=transformers.DynamicCache())
    with pytest.raises(ValueError, match="is_causal=False: a bound model attends to no later token"):
        model(ids, is_causal=False)


def test_attentions_are_refused_where_the_config_asks_for_them() -> None:
    model, ids = bind(make_model("Llama")), torch.ones(1, 4, dtype=torch.int64)
    model.config.output_attentions = True
    with pytest.raises(ValueError, match=r"output_attentions=True \(of the config\)"):
        model(ids)
    assert model(ids, output_attentions=False).attentions is None
    assert token_logprobs(model, ids).shape == (1, 3), "which asks for none"


@pytest.mark.parametrize("family", ["Llama", "Bamba", "Mamba2"])
def test_a_packed_batch_needs_positions(family: str) -> None:
    """A packed batch needs positions: what a collator gives other kernels instead says nothing to a bound model."""
    model, (first, second) = bound_model(family), token_ids(5, 7)
    options = {"return_seq_idx": True, "return_flash_attn_kwargs": True}
    packed, bare = (
        DataCollatorWithFlattening(return_position_ids=given, **options)([{"input_ids": first}, {"input_ids": second}])
        for given in (True, False)
    )
    alone = [model(torch.tensor([ids])).logits[0] for ids in (first, second)]
    assert torch.equal(model(**packed).logits[0], torch.cat(alone))
    names = "cu_seq_lens_q, cu_seq_lens_k, seq_idx"
    with pytest.raises(ValueError, match=f"{names} without position_ids.*begin at 0 at each sequence"):
        model(**bare)


@pytest.mark.parametrize("name", [name for name in dict.fromkeys(EVERY_FAMILY) if "," not in name])
def test_hugging_faces_generation_is_refused_where_it_needs_a_cache(name: str) -> None:
    """Hugging Face's generation is refused where it needs a cache. Without one it computes every token anew, which is
    right.
    """
    model, prompt = bound_model(name), torch.tensor(token_ids(6))
    with pytest.raises(ValueError, match=r"Hugging Face cache.*generate with samebit\.rollout\.RolloutWorker"):
        model.generate(prompt, max_new_tokens=3, do_sample=False)
    found = model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=False, eos_token_id=None)
    with torch.no_grad():
        assert torch.equal(model(found[:, :-1]).logits[:, 5:].argmax(-1), found[:, 6:])


def test_binding_twice() -> None:
    model = bind(make_model("Llama"))
    forwards = {name: module.forward for name, module in model.named_modules()}
    assert bind(model) is model
    assert {name: module.forward for name, module in model.named_modules()} == forwards
    with pytest.raises(BindingError, match="already bound with exact=True"):
        bind(model, exact=False)


@pytest.mark.parametrize("family", ["Llama", "Qwen3_5"])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_without_exactness_torch_multiplies(family: str, with_gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, called = bind(make_model(family), exact=False), []
    monkeypatch.setattr(operations, "multiply", lambda *_: called.append(1))
    with torch.set_grad_enabled(with_gradients):
        model(torch.ones(1, 4, dtype=torch.int64))
    assert not called


@pytest.mark.parametrize("chunk", [0, 8, 48, 100, -64, True, "64", 64.0, None])
def test_a_chunk_is_a_power_of_two(chunk: object) -> None:
    for model in (make_model("Bamba"), bound_model("Bamba"), bound_model("Llama")):
        with pytest.raises(BindingError, match=f"power of two, at least 16, got {chunk!r}$"):
            bind(model, ssm_chunk=chunk)


def test_the_chunk_is_recorded_and_stays() -> None:
    model = bind(make_model("Bamba"), ssm_chunk=128)
    assert binding_of(model).ssm_chunk == 128
    assert bind(model, ssm_chunk=128) is model
    with pytest.raises(BindingError, match="already bound with ssm_chunk=128"):
        bind(model)
    assert binding_of(bound_model("Llama")).ssm_chunk is None


def test_a_hybrid_refuses_a_context_without_its_states() -> None:
    model = bound_model("Bamba")
    context = replace(
        training_context((1, 4), None, None), pages=binding_of(model).kv_layout.allocate(1, 64, torch.float32)
    )
    with use_context(context), pytest.raises(ValueError, match=r"ForwardContext\(states=\.\.\.\)"):
        model(torch.ones(1, 4, dtype=torch.int64))


def test_binding_keeps_parameters_and_state_dict() -> None:
    model = make_model("Gemma3")
    before = {key: (id(value), value.clone()) for key, value in model.named_parameters()}
    keys = list(model.state_dict())
    bind(model)
    assert list(model.state_dict()) == keys
    for key, value in model.named_parameters():
        assert id(value) == before[key][0]
        assert torch.equal(value, before[key][1])


def test_an_unbound_model_has_no_token_logprobs() -> None:
    with pytest.raises(ValueError, match="not bound: call"):
        token_logprobs(make_model("Llama"), torch.ones(1, 4, dtype=torch.int64))


def test_what_wraps_a_bound_model_has_none_either_and_says_what_has() -> None:
    compiled = torch.compile(bound_model("Llama"))  # compiles at the first call
    with pytest.raises(ValueError, match="OptimizedModule is not bound, but what it wraps is: give its _orig_mod"):
        token_logprobs(compiled, torch.zeros(1, 4, dtype=torch.int64))


def test_a_replaced_activation_is_refused() -> None:
    model = make_model("Llama")
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    with pytest.raises(BindingError, match=r"mlp\.act_fn is a Tanh"):
        bind(model)
