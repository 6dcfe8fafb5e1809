"""A bound model whose modules are not those that were bound is refused by name; what is legal stays legal."""

import copy
import re
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize, prune
from transformers.utils import ModelOutput

from samebit.kernels import BindingError, bind, token_logprobs
from samebit.kernels.binding.binding import binding_of
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from .families import make_model, make_wrapped

IDS = torch.arange(1, 40)[None]
FEW = SamplingParams(max_tokens=2)


class Wrapper(nn.Module):
    """Does what an adapter's layer does: it holds the layer it stands for, and adds nothing at first."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 8, bias=False)
        self.lora_B = nn.Linear(8, base_layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Same(nn.Linear):
    """Is another class for an object that stays."""


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def attention(model: Any) -> Any:
    return model.model.layers[1].self_attn


def wrap(parent: nn.Module, *names: str) -> None:
    for name in names:
        setattr(parent, name, Wrapper(parent.get_submodule(name)))


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind


def with_adapters(model: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"]))


Q = r"model\.layers\.1\.self_attn\.q_proj"

CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "adapters of peft": (
        with_adapters,
        r"layers\.0\.self_attn\.q_proj was a Linear, and is another module: a peft.*more",
    ),
    "a wrapped layer": (lambda model: wrap(attention(model), "q_proj"), rf"{Q} was a Linear, and is.*\.Wrapper"),
    "a wrapped head": (
        lambda model: wrap(model, "lm_head"),
        "lm_head was a Linear, and is another module: a .*Wrapper",
    ),
    "another layer of its class": (
        lambda model: setattr(attention(model), "q_proj", nn.Linear(200, 200)),
        rf"{Q} was a Linear, and is another module: a Linear",
    ),
    "larger embeddings": (
        lambda model: model.resize_token_embeddings(1100),
        "embed_tokens was a Embedding|lm_head was",
    ),
    "a layer taken out": (
        lambda model: model.model.layers.pop(1),
        r"model\.layers\.1, a LlamaDecoderLayer, was removed",
    ),
    "fewer layers": (
        lambda model: setattr(model.model, "layers", model.model.layers[:1]),
        r"model\.layers was a ModuleList",
    ),
    "layers in another order": (
        lambda model: model.model.layers.__init__(list(model.model.layers)[::-1]),
        r"model\.layers\.0 was a LlamaDecoderLayer, and is another",
    ),
    "an added module": (
        lambda model: model.model.layers[0].add_module("gate", nn.Linear(2, 2)),
        r"model\.layers\.0\.gate was added, a Linear",
    ),
    "another activation": (
        lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.Tanh()),
        r"mlp\.act_fn was a SiLUActivation, and is another module: a Tanh",
    ),
    "a compiled model": (lambda model: model.compile(), r"the model \(LlamaForCausalLM\) was compiled in place"),
    "a compiled layer": (
        lambda model: model.model.layers[1].compile(),
        r"model\.layers\.1 \(Llama.* compiled in place",
    ),
    "a layer in torch.compile": (
        lambda model: model.model.layers.__setitem__(0, torch.compile(model.model.layers[0])),
        r"model\.layers\.0 was a LlamaDecoderLayer, and is another module: a OptimizedModule",
    ),
    "a compiled forward": (
        lambda model: setattr(model, "forward", torch.compile(model.forward)),
        r"the forward of the model \(LlamaForCausalLM\) was replaced",
    ),
    "another forward": (
        lambda model: setattr(attention(model).q_proj, "forward", attention(model).q_proj.weight.matmul),
        rf"the forward of {Q} \(Linear\) was replaced",
    ),
    "a container's forward": (
        lambda model: setattr(
            model.model.layers[0], "forward", MethodType(lambda self, x, **_: x, model.model.layers[0])
        ),
        r"the forward of model\.layers\.0 \(LlamaDecoderLayer\) was replaced",
    ),
    "the class's forward again": (
        lambda model: delattr(attention(model).q_proj, "forward"),
        rf"the forward of {Q} \(Linear\) was replaced",
    ),
    "another class": (
        lambda model: become(attention(model).q_proj, Same),
        rf"{Q} was a Linear, and its class is .*Same",
    ),
    "a parametrization": (
        lambda model: parametrize.register_parametrization(attention(model).q_proj, "weight", Twice()),
        rf"{Q}\.parametrizations was added.*{Q} was a Linear, and its class is ParametrizedLinear",
    ),
    "weight norm": (lambda model: parametrizations.weight_norm(attention(model).q_proj), "ParametrizedLinear"),
    "spectral norm": (lambda model: nn.utils.spectral_norm(attention(model).q_proj), rf"{Q}\.weight is a parameter no"),
    "a pruned layer": (
        lambda model: prune.l1_unstructured(attention(model).q_proj, "weight", 0.5),
        rf"{Q}\.weight is a parameter no more; {Q}\.weight_orig was added",
    ),
    "a bias": (
        lambda model: setattr(attention(model).q_proj, "bias", nn.Parameter(torch.zeros(200))),
        rf"{Q}\.bias was added, a parameter",
    ),
    "another scaling": (
        lambda model: setattr(attention(model), "scaling", 0.5),
        r"layers\.1\.self_attn\.scaling was 0\.1\d*, and is 0\.5",
    ),
    "a dropout of attention": (
        lambda model: setattr(attention(model), "attention_dropout", 0.1),
        r"layers\.1\.self_attn\.attention_dropout was 0\.0, and is 0\.1",
    ),
    "another eps": (
        lambda model: setattr(model.model.norm, "variance_epsilon", 1e-3),
        r"model\.norm\.variance_epsilon was 1e-06, and is 0\.001",
    ),
    "no eps": (
        lambda model: delattr(model.model.norm, "variance_epsilon"),
        r"model\.norm\.variance_epsilon was 1e-06, and is None",
    ),
    "fewer heads of keys": (
        lambda model: setattr(attention(model), "num_key_value_groups", 1),
        r"layers\.1\.self_attn\.num_key_value_groups was 2, and is 1",
    ),
    "attention to later tokens": (
        lambda model: setattr(attention(model), "is_causal", False),
        r"layers\.1\.self_attn\.is_causal was True, and is False",
    ),
    "a smaller head": (
        lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.zeros(5, 200))),
        r"lm_head\.weight had the shape \[1009, 200\], and has \[5, 200\]",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_is_not_what_was_bound_is_refused_by_whoever_uses_it(name: str) -> None:
    change, message = CHANGES[name]
    model = bind(make_model("Llama", tie_word_embeddings=False))
    with RolloutWorker(model, config=RolloutConfig(num_blocks=8, max_model_len=64)) as worker:
        change(model)
        uses: list[Callable[[], object]] = [
            lambda: token_logprobs(model, IDS),
            lambda: bind(model),
            lambda: RolloutWorker(model),
            lambda: worker.generate([[1, 2, 3]], FEW),
            lambda: worker.submit([1, 2, 3], FEW),
        ]
        for use in uses:
            with pytest.raises(BindingError, match=message) as caught:
                use()
        assert "samebit.kernels.bind" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "number", "other"),
    [
        ("Qwen3Moe", "top_k", 1),
        ("Qwen3Moe", "norm_topk_prob", False),
        ("GptOss", "top_k", 1),
        ("DeepseekV3", "top_k", 1),
        ("DeepseekV3", "topk_group", 1),
        ("SmolLM3", "use_rope", 2),
    ],
)
def test_an_int_or_bool_that_was_changed_is_refused_by_name(name: str, number: str, other: int) -> None:
    model = bind(make_model(name))
    expected = token_logprobs(model, IDS)
    holders = ((path, module) for path, module in model.named_modules() if path and number in vars(module))
    part, module = next(holders)
    before = vars(module)[number]
    setattr(module, number, other)
    with pytest.raises(BindingError, match=re.escape(f"{part}.{number} was {before}, and is {other}")):
        token_logprobs(model, IDS)
    setattr(module, number, before)
    assert torch.equal(token_logprobs(model, IDS), expected)


@pytest.mark.parametrize("part", ["model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"])
@pytest.mark.parametrize(
    ("make", "undo"),
    [
        (lambda part: prune.l1_unstructured(part, "weight", 0.5), lambda part: prune.remove(part, "weight")),
        (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    ],
    ids=["prune", "spectral norm"],
)
def test_weights_that_are_made_before_each_call_are_refused_until_they_are_parameters(
    part: str, make: Callable[[nn.Module], object], undo: Callable[[nn.Module], object]
) -> None:
    model = make_model("Llama", tie_word_embeddings=False)
    make(model.get_submodule(part))
    with pytest.raises(BindingError, match=rf"the weight of {part} is no parameter .*prune\.remove"):
        bind(model)
    undo(model.get_submodule(part))
    token_logprobs(bind(model), IDS)


def test_tangents_are_refused_by_name() -> None:
    """Forward-mode differentiation of frozen weights would otherwise give none, without a word."""
    model = bind(make_model("Llama")).requires_grad_(False)
    with forward_ad.dual_level():
        for call in (lambda: token_logprobs(model, IDS), lambda: model(input_ids=IDS)):
            with pytest.raises(ValueError, match="no tangents"):
                call()
        with RolloutWorker(model, config=RolloutConfig(num_blocks=8, max_model_len=64)) as worker:
            assert len(worker.generate([[1, 2, 3]], FEW)) == 1
    token_logprobs(model, IDS)


@pytest.mark.parametrize("place", ["model.layers.0", "lm_head"])
def test_a_model_that_a_hook_calls_inside_of_another_ones_forward_is_refused(place: str) -> None:
    """It would compute in the other one's layout, and write to its cache; `token_logprobs` has a layout of its own."""
    model, other = bind(make_model("Llama")), bind(make_model("Qwen3"))
    expected, seen, params = token_logprobs(other, IDS), list[object](), SamplingParams(max_tokens=3, seed=1)

    @torch.no_grad()
    def hook(*_: object) -> None:
        seen.append(torch.equal(token_logprobs(other, IDS), expected))
        with pytest.raises(ValueError, match=r"called inside the forward of another bound model.*token_logprobs"):
            other(input_ids=torch.tensor([[1, 2, 3]]))

    with RolloutWorker(model, config=RolloutConfig(num_blocks=8, max_model_len=64)) as worker:
        plain = worker.generate([[1, 2, 3]], params)[0].samples[0]
        scores = token_logprobs(model, IDS)
        with model.get_submodule(place).register_forward_hook(hook):
            worker.reset_prefix_cache()
            assert worker.generate([[1, 2, 3]], params)[0].samples[0].logprobs == plain.logprobs
            assert torch.equal(token_logprobs(model, IDS), scores)
    assert len(seen) > 1
    assert all(seen)


@pytest.mark.parametrize("name", ["Llama", "NemotronH", "Qwen3Moe"])
def test_gradients_of_gradients_are_refused_by_name(name: str) -> None:
    """A penalty on gradients would otherwise be 0, without a word, as would a product with the Hessian."""
    model = bind(make_model(name))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for call in (lambda: token_logprobs(model, IDS), lambda: model(input_ids=IDS).logits):
        with pytest.raises(RuntimeError, match=r"create_graph=True .* first derivatives alone"):
            torch.autograd.grad(call().sum(), weights, create_graph=True, allow_unused=True)
        torch.autograd.grad(call().sum(), weights, allow_unused=True)


def test_a_change_that_is_undone_is_forgotten() -> None:
    model = bind(make_model("Llama"))
    expected = token_logprobs(model, IDS)
    layer = attention(model).q_proj
    with RolloutWorker(model, config=RolloutConfig(num_blocks=8, max_model_len=64)) as worker:
        with pytest.raises(BindingError, match="Wrapper"), worker.weight_update():
            wrap(attention(model), "q_proj")
        attention(model).q_proj = layer
        worker.receive_weights()
        assert len(worker.generate([[1, 2, 3]], FEW)) == 1
    assert torch.equal(token_logprobs(model, IDS), expected)


def test_a_compiled_model_is_not_bound() -> None:
    for compiled in (lambda model: model, lambda model: model.model.layers[1].mlp):
        model = make_model("Llama")
        compiled(model).compile()
        with pytest.raises(BindingError, match=r"(the model|layers\.1\.mlp) .* is compiled"):
            bind(model)
    model = make_model("Llama")
    model.forward = torch.compile(model.forward)
    with pytest.raises(BindingError, match=r"the model \(LlamaForCausalLM\) is compiled"):
        bind(model)


COMPUTED = [
    "model",
    "lm_head",
    *(f"model.layers.1.{part}" for part in ("self_attn", "mlp", "mlp.act_fn", "mlp.up_proj")),
]


@pytest.mark.parametrize(("name", "adapted"), [*((name, False) for name in COMPUTED), ("model.layers.1", True)])
def test_a_forward_of_a_module_s_own_is_not_dropped(name: str, adapted: bool) -> None:
    model = make_model("Llama")
    if adapted:
        with_adapters(model)
    module = model.get_submodule(name)
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs)
    says = rf"{re.escape(name)} \({type(module).__name__}\) has a forward of its own"
    with pytest.raises(BindingError, match=says):
        bind(model)
    assert [name for name, one in model.named_modules() if "forward" in vars(one)] == [name]
    del module.forward
    bind(model)


def test_a_forward_that_leaves_all_to_that_of_the_class_is_none_of_its_own() -> None:
    model = make_model("Llama")
    expected = token_logprobs(bind(copy.deepcopy(model)), IDS)
    mlp, head = model.model.layers[1].mlp, model.lm_head
    mlp.forward = torch.autocast("cpu", torch.bfloat16)(mlp.forward)
    head.forward = head.forward
    assert torch.equal(token_logprobs(bind(model), IDS), expected)


def test_a_forward_of_a_layer_s_own_runs_in_trainer_and_rollout() -> None:
    model = make_model("Llama")
    layer, own, calls = model.model.layers[1], model.model.layers[1].forward, []
    layer.forward = lambda *args, **kwargs: calls.append(args) or own(*args, **kwargs)
    token_logprobs(bind(model), IDS)
    assert len(calls) == 1
    with RolloutWorker(model, config=RolloutConfig(num_blocks=8, max_model_len=64)) as worker:
        worker.generate([[1, 2, 3]], FEW)
    assert len(calls) > 1


def test_an_idle_dropout_that_wakes_up() -> None:
    model = make_model("Llama")
    model.model.layers[0].resid_dropout = nn.Dropout(0.0)
    bind(model).train()
    token_logprobs(model, IDS)
    model.model.layers[0].resid_dropout.p = 0.1
    with pytest.raises(BindingError, match=r"layers\.0\.resid_dropout, a Dropout that did nothing, has p=0\.1"):
        token_logprobs(model, IDS)


def wrapped_layers(model: Any) -> None:
    """Wrap layers in gradient checkpointing as torch's own trainers do."""
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)


def prepared_by_accelerate(model: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)


def unwrapped_by_accelerate(model: Any) -> None:
    """Prepare the model for mixed precision, and have the wrapper of that taken off again."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False) is model


LEGAL: dict[str, Callable[[Any], object]] = {
    "train": lambda model: model.train(),
    "eval": lambda model: model.eval(),
    "gradient checkpointing": lambda model: (model.train(), model.gradient_checkpointing_enable()),
    "checkpointed and left": lambda model: (
        model.gradient_checkpointing_enable(),
        model.gradient_checkpointing_disable(),
    ),
    "wrappers of checkpointing": wrapped_layers,
    "hooks": lambda model: [
        (
            module.register_forward_pre_hook(lambda module, given: None),
            module.register_forward_hook(lambda module, given, output: None),
            module.register_full_backward_hook(lambda module, given, output: None),
        )
        for module in (model, attention(model), attention(model).q_proj)
    ],
    "gradients of the inputs": lambda model: model.enable_input_require_grads(),
    "frozen": lambda model: model.requires_grad_(False),
    "assigned weights": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "other parameters": lambda model: setattr(
        attention(model).q_proj, "weight", nn.Parameter(attention(model).q_proj.weight.detach().clone())
    ),
    "a buffer": lambda model: model.register_buffer("calls", torch.zeros(1)),
    "numbers that nothing is computed with": lambda model: (
        setattr(attention(model), "layer_idx", 0),
        setattr(model.model.rotary_emb, "max_seq_len_cached", 5),
        setattr(model.model, "padding_idx", 5),
        setattr(attention(model), "_seen", True),
        setattr(attention(model), "seen", 1),
    ),
    "mixed precision of Accelerate": prepared_by_accelerate,
    "mixed precision of Accelerate, unwrapped": unwrapped_by_accelerate,
}


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForCausalLM"])
def test_a_wrapper_of_checkpointing_around_all_layers_is_refused(kind: str) -> None:
    """A wrapper of checkpointing around all layers is refused: what it recomputes is the call of the decoder alone,
    which does not say where sequences begin.
    """
    model = bind(make_model("Llama"))
    outer = nn.ModuleDict({"policy": model})
    expected = token_logprobs(model, IDS)
    apply_activation_checkpointing(outer, check_fn=lambda module: type(module).__name__ == kind)
    if kind == "LlamaForCausalLM":
        with pytest.raises(ValueError, match="CheckpointWrapper is not bound, but what it wraps is"):
            token_logprobs(outer["policy"], IDS)
        return
    with pytest.raises(BindingError, match=r"model is in a checkpoint_wrapper as a whole.*around each layer"):
        token_logprobs(model, IDS)
    model.model = model.model._checkpoint_wrapped_module
    assert torch.equal(token_logprobs(model, IDS), expected)


def test_a_wrapper_of_checkpointing_around_all_layers_of_a_model_with_vision_is_refused() -> None:
    model = bind(make_wrapped("Qwen3_5"))
    for parent, name in ((model.model, "language_model"), (model, "model")):
        whole = parent.get_submodule(name)
        parent.add_module(name, checkpoint_wrapper(whole))
        with pytest.raises(BindingError, match=rf"{name} is in a checkpoint_wrapper as a whole"):
            token_logprobs(model, IDS)
        parent.add_module(name, whole)
    token_logprobs(model, IDS)


def test_wrappers_of_checkpointing_around_layers_keep_the_gradients_of_several_sequences() -> None:
    """Wrappers of checkpointing keep the gradients of two sequences of as many tokens as there are in one chunk, so
    that nothing but the layout tells them apart.
    """
    model = bind(make_model("Llama"))
    ids = torch.arange(128).view(2, 64)
    expected = torch.autograd.grad(token_logprobs(model, ids).sum(), list(model.parameters()))
    wrapped_layers(model)
    for one, other in zip(
        torch.autograd.grad(token_logprobs(model, ids).sum(), list(model.parameters())), expected, strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:a bound model computes in the dtype of its parameters")
@pytest.mark.parametrize("name", LEGAL)
def test_what_is_legal_after_binding(name: str) -> None:
    model = bind(make_model("Llama"))
    expected = token_logprobs(model, IDS).detach()
    with RolloutWorker(model, config=RolloutConfig(num_blocks=8, max_model_len=64)) as worker:
        LEGAL[name](model)
        assert bind(model) is model
        assert torch.equal(token_logprobs(model, IDS), expected)
        output = worker.generate([[1, 2, 3]], FEW)[0]
    ids = torch.tensor([output.prompt_token_ids + output.samples[0].token_ids])
    assert token_logprobs(model, ids)[0, -2:].tolist() == output.samples[0].logprobs


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.v_proj", "self_attn.k_norm", "mlp.gate_proj"])
def test_hooks_on_modules_that_may_be_computed_together_run_in_trainer_and_rollout(name: str) -> None:
    model = bind(make_model("Qwen3"))
    expected = token_logprobs(model, IDS).detach()
    [module] = [module for path, module in model.named_modules() if path.endswith(f"layers.1.{name}")]
    module.register_forward_hook(lambda module, given, output: output * 1.5)
    assert not torch.equal(token_logprobs(model, IDS), expected)
    with RolloutWorker(model, config=RolloutConfig(num_blocks=8, max_model_len=64)) as worker:
        output = worker.generate([[1, 2, 3]], FEW)[0]
    ids = torch.tensor([output.prompt_token_ids + output.samples[0].token_ids])
    assert token_logprobs(model, ids)[0, -2:].tolist() == output.samples[0].logprobs
    with torch.no_grad():
        assert token_logprobs(model, ids)[0, -2:].tolist() == output.samples[0].logprobs


@pytest.mark.parametrize("adapted", [False, True])
def test_hooks_of_all_modules_see_those_that_may_be_computed_together(adapted: bool) -> None:
    model = make_model("Qwen3")
    if adapted:
        with_adapters(model)
    expected = token_logprobs(bind(model), IDS).detach()
    layer, called = model.model.layers[1], set[nn.Module]()
    wanted = {part for part in (layer.self_attn, layer.mlp) for part in part.modules() if is_computed(part)}
    with RolloutWorker(model, config=RolloutConfig(num_blocks=8, max_model_len=64)) as worker:
        worker.generate([[1, 2, 3]], FEW)
        handle = register_module_forward_hook(lambda module, given, output: called.add(module))
        try:
            assert torch.equal(token_logprobs(model, IDS), expected)
            assert wanted <= called
            called.clear()
            with torch.no_grad():
                assert torch.equal(token_logprobs(model, IDS), expected)
            assert wanted <= called
            called.clear()
            output = worker.generate([[1, 2, 3]], FEW)[0]
            assert wanted <= called
        finally:
            handle.remove()
    ids = torch.tensor([output.prompt_token_ids + output.samples[0].token_ids])
    assert token_logprobs(model, ids)[0, -2:].tolist() == output.samples[0].logprobs


def is_computed(module: nn.Module) -> bool:
    """Tell whether a module multiplies or normalises."""
    return isinstance(module, nn.Linear) or "Norm" in type(module).__name__


@pytest.mark.parametrize("name", ["", "model"])
def test_a_hook_on_the_model_or_its_decoder_sees_what_transformers_makes(name: str) -> None:
    """A hook on the model or its decoder sees what transformers makes. In a rollout nobody else reads it, so without a
    hook it is not made.
    """
    model = bind(make_model("Qwen3"))
    seen = []
    model.get_submodule(name).register_forward_hook(lambda module, given, output: seen.append(output))
    with RolloutWorker(model, config=RolloutConfig(num_blocks=8, max_model_len=64)) as worker:
        output = worker.generate([[1, 2, 3]], FEW)[0]
    assert seen
    assert all(isinstance(one, ModelOutput) for one in seen)
    ids = torch.tensor([output.prompt_token_ids + output.samples[0].token_ids])
    assert token_logprobs(model, ids)[0, -2:].tolist() == output.samples[0].logprobs


def spoil(model: nn.Module) -> None:
    """Fill weights with NaN, which whoever computes with them has, now or later."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)


@pytest.mark.filterwarnings("ignore:a bound model computes in the dtype of its parameters")
@pytest.mark.parametrize(
    ("name", "prepare"),
    [
        *(("Llama", prepare) for prepare in (None, prepared_by_accelerate, wrapped_layers)),
        *((name, None) for name in ("Mamba2", "Qwen3Next", "GlmMoeDsa")),
    ],
)
def test_a_copy_computes_with_its_own_weights(name: str, prepare: Callable[[Any], object] | None) -> None:
    model = bind(make_model(name))
    expected = token_logprobs(model, IDS).detach()
    if prepare is not None:
        prepare(model)
    twin = copy.deepcopy(model)
    spoil(model)
    assert torch.equal(token_logprobs(twin, IDS), expected)
    with RolloutWorker(twin, config=RolloutConfig(num_blocks=8, max_model_len=64)) as worker:
        output = worker.generate([[1, 2, 3]], FEW)[0]
    ids = torch.tensor([output.prompt_token_ids + output.samples[0].token_ids])
    assert token_logprobs(twin, ids)[0, -2:].tolist() == output.samples[0].logprobs


def test_a_copy_whose_forward_would_run_the_model_it_was_copied_from_is_refused() -> None:
    """A copy is refused whose forward would run the model that it was copied from, as a wrapped forward does."""
    model = bind(make_model("Llama"))
    model.forward = torch.autocast("cpu", torch.bfloat16, enabled=False)(model.forward)
    token_logprobs(model, IDS)
    with pytest.raises(BindingError, match=r"the forward of the model .* is that of the module it is a copy of"):
        token_logprobs(copy.deepcopy(model), IDS)


def test_a_copy_with_a_forward_that_was_replaced_before_binding_is_refused() -> None:
    model = make_model("Llama")
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    expected = token_logprobs(bind(model), IDS)
    with pytest.raises(ValueError, match="this copy of a bound LlamaForCausalLM would run the model that it was"):
        token_logprobs(copy.deepcopy(model), IDS)
    assert torch.equal(token_logprobs(model, IDS), expected)


def test_a_forward_that_is_a_method_of_something_else_stays_its_method() -> None:
    class Counting:
        def __init__(self, forward: Callable[..., Any]) -> None:
            self.own, self.calls = forward, 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.own(*args, **kwargs)

    model = make_model("Llama")
    counting = Counting(model.forward)
    model.forward = counting.forward
    expected = token_logprobs(bind(make_model("Llama")), IDS)
    assert torch.equal(token_logprobs(bind(model), IDS), expected)
    assert counting.calls == 1


def test_a_copy_is_bound_by_itself() -> None:
    model = bind(make_model("Llama"))
    with RolloutWorker(model, config=RolloutConfig(num_blocks=8, max_model_len=64)):
        twin = copy.deepcopy(model)
        assert torch.equal(token_logprobs(twin, IDS), token_logprobs(model, IDS))
        assert not binding_of(twin).users.in_order()
        wrap(attention(twin), "q_proj")
        with pytest.raises(BindingError, match=Q):
            token_logprobs(twin, IDS)
        token_logprobs(model, IDS)
