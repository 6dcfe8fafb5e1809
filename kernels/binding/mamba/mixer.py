"""Define the Mamba2 mixer that `bind` gives to hybrid models: projection, convolution, scan, gate, projection.

Derived values are computed from their source at every call: ``-exp(A_log)`` from the parameter, Falcon-H1's
multipliers from the config (its ``mup_vector`` buffer is in no state dict and ``.to(bfloat16)`` truncates it).
"""

from dataclasses import dataclass
from typing import Any

import torch

from samebit.kernels.binding.residual import Addend
from samebit.kernels.layout.forward_context import recurrent_layout_of
from samebit.kernels.layout.options import GatedNormOptions, SSMOptions
from samebit.kernels.ops.activation import gated
from samebit.kernels.ops.conv import causal_conv
from samebit.kernels.ops.norm import gated_rms_norm
from samebit.kernels.ops.ssd import scan


@dataclass(frozen=True)
class MambaFacts:
    """Holds shapes and options of a mixer.

    Attributes:
        inner: width of x and of the gate.
        conv_width: width of what is convolved.
        options: the scan's.
        norm: the gated norm's, None for the plain gate ``y * silu(gate)``.
        in_multiplier: factor on the mixer's input.
        multipliers: ``(width, factor)`` of the pieces of the projection; empty for none.
    """

    inner: int
    conv_width: int
    options: SSMOptions
    norm: GatedNormOptions | None
    in_multiplier: float = 1.0
    multipliers: tuple[tuple[int, float], ...] = ()


def mamba_forward(
    self: Any,
    hidden_states: torch.Tensor,
    cache_params: None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute a Mamba2 mixer; what else it is given are Hugging Face's cache and positions, which hold nothing here."""
    facts: MambaFacts = self.samebit
    context = recurrent_layout_of(attention_mask)
    projected = _projected(self, facts, hidden_states)
    gate, xbc, dt = projected.split([facts.inner, facts.conv_width, len(self.A_log)], dim=-1)
    xbc = causal_conv(xbc, self.conv1d.weight, self.conv1d.bias, context, facts.options.layer)
    rate = -self.A_log.float().exp()
    y = scan(xbc, dt, rate, self.dt_bias.float(), self.D.float(), context, facts.options)
    y = gated("silu", gate, y) if facts.norm is None else gated_rms_norm(y, gate, self.norm.weight, facts.norm)
    out: torch.Tensor = self.out_proj(y)
    return Addend.of(out.view(hidden_states.shape))


def _projected(self: Any, facts: MambaFacts, hidden_states: torch.Tensor) -> torch.Tensor:
    """Project to ``[T, inner + conv_width + H]``."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    projected: torch.Tensor = self.in_proj(x if facts.in_multiplier == 1.0 else x * facts.in_multiplier)
    if not facts.multipliers:
        return projected
    pieces = [
        torch.full((width,), factor, dtype=torch.float32, device=projected.device)
        for width, factor in facts.multipliers
    ]
    return (projected * torch.cat(pieces)).to(projected.dtype)
