"""Run a decoder layer of attention and a gated MLP as one call in a rollout, where no hook could tell.

`Family.layer` says of which families the layers are ``x + attention(norm(x))``, then ``x + mlp(norm(x))``. What each
part computes stands in the facts that `bind` gave to its module; here they are put together.

Invariants:

* The modules decide: a hook on one of them, a forward that was replaced, an adapter in its place or for its rows, and
  gradients bring back the class's own forward, which calls them one by one. Hooks of the layer itself are torch's.
* Nothing of a module is kept: its parameters are looked up at each call.
"""

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from samebit.kernels.binding.lora.forwards import linear_forward
from samebit.kernels.binding.modules import (
    AttentionFacts,
    MLPFacts,
    NormFacts,
    attention_forward,
    mlp_forward,
    rms_norm_forward,
)
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.options import DenseOptions, DenseWeights
from samebit.kernels.ops.activation import SILU
from samebit.kernels.ops.dense.layer import dense_layer
from samebit.kernels.ops.linear import is_hooked, weight_and_bias
from samebit.kernels.ops.rope import RotaryTables


@dataclass(frozen=True)
class DenseLayerFacts:
    """Holds what the layer's call needs to know beside its parameters; ``head_norms``: queries and keys have some."""

    options: DenseOptions
    head_norms: bool


def facts_of(layer: nn.Module, parts: dict[nn.Module, Any]) -> DenseLayerFacts | None:
    """Put together the facts of a layer's modules; None for one that is to call them one by one.

    Args:
        layer: as transformers has it, with ``self_attn``, ``mlp`` and the norm before each.
        parts: what `bind` gives to each module, its forward and its facts.
    """
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    norms = [layer.get_submodule(name) for name in ("input_layernorm", "post_attention_layernorm")]
    of_attention, of_mlp, *of_norms = (_facts(parts.get(module)) for module in (attention, mlp, *norms))
    if not (isinstance(of_attention, AttentionFacts) and isinstance(of_mlp, MLPFacts)):
        return None
    if not (_is_plain_attention(of_attention) and _is_plain_mlp(of_mlp) and "forward" not in vars(layer)):
        return None
    of_heads = NormFacts(0.0, 0.0)
    if of_attention.qk_norm == "head":
        of_heads = _facts(parts.get(attention.get_submodule("q_norm")))
    pairs = [(norm.eps, norm.offset) for norm in (*of_norms, of_heads) if isinstance(norm, NormFacts)]
    if len(pairs) != 3:
        return None
    size = of_attention.head_dim
    outputs, width = attention.get_parameter("q_proj.weight").shape
    options = DenseOptions(
        of_attention.options,
        width,
        outputs // size,
        of_attention.kv_heads,
        size,
        mlp.get_parameter("gate_proj.weight").shape[0],
        (pairs[0], pairs[1], pairs[2]),
    )
    return DenseLayerFacts(options, of_attention.qk_norm == "head")


def _facts(attached: Any) -> Any:
    return None if attached is None or len(attached) < 2 else attached[1]


def _is_plain_attention(facts: AttentionFacts) -> bool:
    special = facts.fused or facts.gated or facts.sinks or facts.adapter >= 0 or facts.qk_norm == "full"
    return not special and facts.key_multiplier == 1.0


def _is_plain_mlp(facts: MLPFacts) -> bool:
    plain = facts.form == "separate" and facts.gate_multiplier == facts.down_multiplier == 1.0
    return plain and facts.activation in SILU


def dense_layer_forward(
    self: Any, hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
) -> Any:
    """Run the layer as one call, or its class's own forward."""
    if isinstance(position_embeddings, RotaryTables) and _in_rollout(position_embeddings.context):
        facts: DenseLayerFacts = self.samebit
        weights = _weights(self, facts)
        if weights is not None:
            out = dense_layer(hidden_states, weights, position_embeddings, facts.options)
            if out is not None:
                return out
    return type(self).forward(self, hidden_states, *args, position_embeddings=position_embeddings, **kwargs)


def _in_rollout(context: ForwardContext) -> bool:
    adapted = context.adapters is not None and bool(context.adapters.groups)
    return context.pages is not None and not adapted and not torch.is_grad_enabled()


def _weights(layer: Any, facts: DenseLayerFacts) -> DenseWeights | None:
    """Return the layer's parameters; None where a call of its modules does more than compute with them."""
    if torch_modules._has_any_global_hook():
        return None
    children = layer._modules
    first, second = children["input_layernorm"], children["post_attention_layernorm"]
    attention, mlp = children["self_attn"], children["mlp"]
    of_attention, of_mlp = attention._modules, mlp._modules
    linears = [of_attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [of_mlp[name] for name in ("gate_proj", "up_proj", "down_proj")]
    norms = [first, second]
    if facts.head_norms:
        norms += [of_attention["q_norm"], of_attention["k_norm"]]
    untouched = (
        _runs(attention, attention_forward)
        and _runs(mlp, mlp_forward)
        and all(_runs(norm, rms_norm_forward) for norm in norms)
        and all(_runs(linear, linear_forward) and type(linear) is nn.Linear for linear in linears)
    )
    if not untouched:
        return None
    q, k, v, o, gate, up, down = map(weight_and_bias, linears)
    of_norms = [norm._parameters["weight"] for norm in norms]
    of_heads = of_norms[2:] or (None, None)
    return DenseWeights._make((of_norms[0], *q, *k, *v, *of_heads, *o, of_norms[1], *gate, *up, *down))


def _runs(module: Any, forward: Any) -> bool:
    """Return whether a call of the module is the forward that `bind` gave it, and no hook listens."""
    own = module.__dict__.get("forward")
    return isinstance(own, MethodType) and own.__func__ is forward and not is_hooked(module)
