"""Define the forward that `bind` gives to Gated DeltaNet layers: projections, convolution, delta rule, norm, gate.

Derived values are computed from their source at every call; q and k are normalised inside the delta rule. Hugging Face
multiplies padding with zero; here it reaches no sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch

from samebit.kernels.binding.families.delta_family import DeltaFamily
from samebit.kernels.binding.lora.forwards import projection, projections
from samebit.kernels.binding.residual import Addend
from samebit.kernels.layout.forward_context import recurrent_layout_of
from samebit.kernels.layout.layers.delta import MixerOptions
from samebit.kernels.layout.options import DeltaOptions, GatedNormOptions
from samebit.kernels.ops.conv import causal_conv
from samebit.kernels.ops.delta.gates import gates
from samebit.kernels.ops.delta.rule import delta_rule
from samebit.kernels.ops.norm import gated_rms_norm


@dataclass(frozen=True)
class DeltaFacts:
    """Holds shapes and options of a Gated DeltaNet layer.

    Attributes:
        family: what its modules are called.
        options: the delta rule's.
        convolutions: the names of its convolutions: one, or those of q, k and v.
        norm: the gated norm's options; its weight is that of one head.
        beta_scale: beta is at most this.
        one_call: of a mixer that a rollout may compute with its decoder layer in one call.
    """

    family: DeltaFamily
    options: DeltaOptions
    convolutions: tuple[str, ...]
    norm: GatedNormOptions
    beta_scale: float
    one_call: MixerOptions | None = None


@dataclass(frozen=True)
class Projected:
    """Holds the projections of T rows: q, k and v ``[T, 2 Hk K + Hv V]``, the gate, and what beta and decay are of."""

    qkv: torch.Tensor
    gate: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


def delta_forward(
    self: Any,
    hidden_states: torch.Tensor,
    cache_params: None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute a Gated DeltaNet layer; what else it is given are Hugging Face's cache and positions, which hold nothing
    here.
    """
    facts: DeltaFacts = self.samebit
    context = recurrent_layout_of(attention_mask)
    x = _projections(self, facts, hidden_states.reshape(-1, hidden_states.shape[-1]))
    taps = [self.get_submodule(name).weight for name in facts.convolutions]
    qkv = causal_conv(x.qkv, taps[0] if len(taps) == 1 else torch.cat(taps), None, context, facts.options.layer)
    owner = self.forget_gate if facts.family.by_channel else self
    decay, beta = gates(x.a, x.b, owner.A_log.view(-1), owner.dt_bias, facts.beta_scale)
    y = delta_rule(qkv, decay, beta, context, facts.options)
    weight = self.get_submodule(facts.family.norm).weight
    out = projection(gated_rms_norm(y, x.gate, weight, facts.norm), self.get_submodule(facts.family.out))
    return Addend.of(out.view(hidden_states.shape))


def _projections(self: Any, facts: DeltaFacts, x: torch.Tensor) -> Projected:
    family = facts.family
    of_groups = [projections(x, tuple(map(self.get_submodule, names))) for names in family.inputs]
    if family.projections == "by_key_head":
        return _by_key_head(facts.options, *of_groups[0])
    if family.projections == "joined":
        return Projected(*of_groups[0], *of_groups[1])
    qkv, (gate, b, a) = torch.cat(of_groups[0], dim=-1), of_groups[1]
    if family.by_channel:
        gate, a = self.g_b_proj(gate), self.forget_gate.f_b_proj(a)
    return Projected(qkv, gate, b, a)


def _by_key_head(options: DeltaOptions, qkvz: torch.Tensor, ba: torch.Tensor) -> Projected:
    """Put in order what stands together per key head: its query, its key, its values, their gates; and b and a."""
    rows, heads, each = len(qkvz), options.key_heads, options.value_heads // options.key_heads
    widths = [options.key_dim, options.key_dim, each * options.value_dim, each * options.value_dim]
    q, k, v, gate = (part.reshape(rows, -1) for part in qkvz.view(rows, heads, -1).split(widths, dim=-1))
    b, a = (part.reshape(rows, -1) for part in ba.view(rows, heads, -1).split(each, dim=-1))
    return Projected(torch.cat((q, k, v), dim=-1), gate, b, a)
