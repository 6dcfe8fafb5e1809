"""Define the forward that `bind` gives to gated short convolutions: projection, gate, convolution, gate, projection.

The gates are products of the model's dtype, one IEEE operation an element, so torch's own are exact. Hugging Face
multiplies padding with zero; here it reaches no sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch

from samebit.kernels.binding.lora.forwards import projection
from samebit.kernels.binding.residual import Addend
from samebit.kernels.layout.forward_context import recurrent_layout_of
from samebit.kernels.ops.conv import causal_conv


@dataclass(frozen=True)
class ShortConvFacts:
    """Says which part of the state memory the window of a layer is in."""

    layer: int


def short_conv_forward(
    self: Any, hidden_states: torch.Tensor, *args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """Compute ``out_proj(C * conv(B * x))`` of the B, C and x that ``in_proj`` gives; what else it is given are Hugging
    Face's cache and places of packed sequences, which hold nothing here."""
    facts: ShortConvFacts = self.samebit
    context = recurrent_layout_of(attention_mask)
    projected = projection(hidden_states.reshape(-1, hidden_states.shape[-1]), self.in_proj)
    before, behind, x = projected.chunk(3, dim=-1)
    y = causal_conv(before * x, self.conv.weight, self.conv.bias, context, facts.layer, silu=False)
    return Addend.of(projection(behind * y, self.out_proj).view(hidden_states.shape))
