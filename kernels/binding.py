"""``bind(model)``: give a Hugging Face causal language model samebit's forward, in place.

Invariants:

* Only the instance changes: the ``forward`` of modules that are known by class. Nothing of torch or
  transformers is patched, parameters and state dict stay what they were, ``copy.deepcopy`` works.
* A module that computes and is not known is an error that names it. Nothing is dropped silently.
* Derived values (rotary frequencies, embedding scales) come from the config in float32; the module's own
  buffers are ignored, because ``.to(bfloat16)`` truncates them and no state dict holds them.
* Autocast does not reach the operations: a bound model computes in the dtype of its parameters.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from . import bound_modules as bound
from .activation import ACTIVATIONS
from .attention import AttentionOptions
from .families import FAMILIES, Family, inexact_features
from .pages import KVLayout

Model = TypeVar("Model", bound=nn.Module)

_DTYPES = (torch.float32, torch.bfloat16)


class BindingError(ValueError):
    """The model can not be bound exactly; the message names every reason."""


@dataclass(frozen=True)
class Binding:
    """What `bind` found out about a model."""

    family: Family
    kv_layout: KVLayout
    vocab_size: int
    exact: bool


def bind(model: Model, *, exact: bool = True) -> Model:
    """Give ``model`` the forward whose bits do not depend on the batch; binding twice changes nothing.

    The same module then serves trainer and rollout. It takes ``input_ids``, ``attention_mask`` (left or right
    padded), ``position_ids`` (packed batches), ``logits_to_keep``; it gives float32 logits (those
    of torch's own head with ``exact=False``) and keeps no Hugging Face cache. Gradient checkpointing works as before.

    Args:
        model: a Hugging Face causal language model on the CPU, float32 or bfloat16.
        exact: False leaves norms, activations and GEMMs to torch. For measuring what exactness costs.

    Returns:
        The model itself.

    Raises:
        BindingError: a family, feature, module, dtype or device that is not exact, by name. The model is
            left as it was.
    """
    if is_bound(model):
        _check_tensors(model)
        if binding_of(model).exact != exact:
            raise BindingError(f"the model is already bound with exact={not exact}")
        return model
    family = _family_of(model)
    _check_tensors(model)
    config: Any = model.config
    plan = _Plan(family, config, config.to_dict(), exact)
    bindings = [(module, plan.binding_of(name, module)) for name, module in model.named_modules()]
    for module, attached in bindings:
        if attached is not None:
            bound.attach(module, *attached)
    head: nn.Linear = model.get_submodule("lm_head")  # type: ignore[assignment]
    if exact:
        bound.attach(head, bound.head_forward)
    layout = KVLayout(plan.layers, config.num_key_value_heads, plan.head_dim)
    model.__dict__["samebit"] = Binding(family=family, kv_layout=layout, vocab_size=head.weight.shape[0], exact=exact)
    return model


def is_bound(model: nn.Module) -> bool:
    """Whether `bind` has been applied to this model."""
    return isinstance(model.__dict__.get("samebit"), Binding)


def binding_of(model: nn.Module) -> Binding:
    """The model's `Binding`.

    Raises:
        ValueError: the model is not bound.
    """
    binding = model.__dict__.get("samebit")
    if not isinstance(binding, Binding):
        raise ValueError(f"{type(model).__name__} is not bound: call samebit.kernels.bind(model) first")
    return binding


def _family_of(model: nn.Module) -> Family:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise BindingError(f"{name} is not a Hugging Face model; bound families: {', '.join(FAMILIES)}")
    config = model.config.to_dict()
    reasons = inexact_features(config, [key for key, _ in model.named_parameters()])
    family = FAMILIES.get(name)
    if family is None:
        reasons.insert(0, "it is of no known family")
    elif config[family.activation] not in ACTIVATIONS:
        reasons.append(f"activation {config[family.activation]!r} (exact: {', '.join(ACTIVATIONS)})")
    if family is None or reasons:
        raise BindingError(
            f"{name} can not be bound exactly: {'; '.join(reasons)}. Bound families: {', '.join(FAMILIES)}"
        )
    return family


def _check_tensors(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype not in _DTYPES:
            raise BindingError(f"{name} is {parameter.dtype}; exact on the CPU: float32, bfloat16")
        if parameter.device.type != "cpu":
            raise BindingError(f"{name} is on device {parameter.device}; only CPU kernels exist")


class _Plan:
    """Decides, module by module in the order of the traversal, which forward it gets."""

    def __init__(self, family: Family, config: Any, facts: dict[str, Any], exact: bool) -> None:
        self.family = family
        self.config = config
        self.facts = facts
        self.exact = exact
        self.head_dim: int = facts.get("head_dim") or config.hidden_size // config.num_attention_heads
        self.layers = 0

    def binding_of(self, name: str, module: nn.Module) -> tuple[Any, ...] | None:
        """(forward, facts) for `attach`, or None for what needs none."""
        family, kind = self.family, type(module).__name__
        if kind in [family.class_name(part) for part in ("Model", "TextModel")]:
            return (bound.decoder_forward,)
        if kind == family.class_name("Attention"):
            return bound.attention_forward, self._attention()
        if kind == family.class_name("RotaryEmbedding"):
            return bound.rotary_forward, self._rotary(module)
        if kind == family.scaled_embedding:
            return bound.embedding_forward, bound.EmbeddingFacts(self.config.hidden_size**0.5)
        rowwise = self._rowwise(module)
        if rowwise is None and not self._needs_no_binding(module):
            raise BindingError(f"{self.family.prefix}: {name} is a {kind}, which is not bound exactly")
        return rowwise if self.exact else None

    def _rowwise(self, module: nn.Module) -> tuple[Any, ...] | None:
        """Forwards of the modules that torch computes too, only with bits that depend on the batch."""
        family, kind = self.family, type(module).__name__
        if kind == family.class_name("MLP"):
            return bound.mlp_forward, bound.MLPFacts(self.facts[family.activation], family.fused)
        if kind == family.class_name("RMSNorm"):
            return bound.rms_norm_forward, bound.NormFacts(vars(module)[family.norm_eps], family.norm_offset)
        if type(module) is nn.Linear:
            return (bound.linear_forward,)
        if type(module) is nn.LayerNorm and module.weight is not None and module.bias is not None:
            return (bound.layer_norm_forward,)
        return None

    def _needs_no_binding(self, module: nn.Module) -> bool:
        containers = [self.family.class_name(part) for part in ("ForCausalLM", "DecoderLayer")]
        idle = isinstance(module, nn.Dropout) and module.p == 0.0
        activation = type(module) is type(ACT2FN[self.facts[self.family.activation]])  # the bound MLP computes it
        return (
            type(module).__name__ in containers
            or type(module) in (nn.ModuleList, nn.Embedding, nn.Identity)
            or idle
            or activation
        )

    def _attention(self) -> bound.AttentionFacts:
        layer = self.layers
        self.layers += 1
        scale = self.head_dim**-0.5
        if self.facts.get("query_pre_attn_scalar"):
            scale = self.facts["query_pre_attn_scalar"] ** -0.5
        return bound.AttentionFacts(
            kv_heads=self.config.num_key_value_heads,
            head_dim=self.head_dim,
            fused=self.family.fused,
            qk_norm=self.family.qk_norm,
            options=AttentionOptions(
                layer, scale, self._window(layer), self.facts.get("attn_logit_softcapping") or 0.0
            ),
        )

    def _window(self, layer: int) -> int:
        window: int = self.facts.get("sliding_window") or 0
        layer_types = self.facts.get("layer_types")
        if layer_types is None:
            return window
        return window if layer_types[layer] == "sliding_attention" else 0

    def _rotary(self, module: Any) -> bound.RotaryFacts:
        frequencies, scaling = {}, {}
        for layer_type in sorted(set(self.config.layer_types)) if self.family.rope_per_layer_type else [""]:
            parameters = self.config.rope_parameters
            parameters = parameters[layer_type] if layer_type else parameters
            kind = parameters["rope_type"]
            compute = module.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
            arguments = {"layer_type": layer_type} if layer_type else {}
            inverse, factor = compute(self.config, **arguments)
            frequencies[layer_type] = inverse.to(torch.float32)
            scaling[layer_type] = float(factor)
        return bound.RotaryFacts(frequencies, scaling)
