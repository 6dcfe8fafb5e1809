"""Give tests a convolution without silu, which keeps a window and no state: inputs, oracle, the way through windows."""

from dataclasses import dataclass

import numpy as np
import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.states.conv import ConvShape
from samebit.kernels.ops.conv import causal_conv

from . import reference
from .helpers import memory
from .mamba_layer import step_context
from .routes import NextCount, steps


@dataclass(frozen=True)
class Case:
    """Holds the sizes of a layer, and its chunk."""

    shape: ConvShape
    biased: bool
    chunk: int = 16


@dataclass
class Layer:
    """Holds inputs of T rows and the layer's parameters."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def run(self, context: ForwardContext) -> torch.Tensor:
        return causal_conv(self.x, self.weight, self.bias, context, 0, silu=False)

    def rows(self, rows: np.ndarray, padding: int = 0, device: str = "cpu") -> "Layer":
        """Return these rows, and as many of NaN, as a part of a wider matrix."""
        x = torch.cat([self.x[rows], self.x.new_full((padding, self.x.shape[1]), torch.nan)])
        joined = torch.cat([x, x.new_full((len(x), 16), torch.nan)], dim=1).to(device)
        bias = None if self.bias is None else self.bias.to(device)
        return Layer(joined[:, : self.x.shape[1]], self.weight.to(device), bias)


def layer_of(case: Case, dtype: torch.dtype, lengths: tuple[int, ...]) -> Layer:
    torch.manual_seed(case.shape.conv_width)
    width, taps = case.shape.conv_width, case.shape.taps
    return Layer(
        torch.randn(sum(lengths), width).to(dtype),
        torch.randn(width, 1, taps).to(dtype),
        torch.randn(width).to(dtype) if case.biased else None,
    )


def oracle(layer: Layer, lengths: tuple[int, ...]) -> torch.Tensor:
    parts = layer.x.split(lengths)
    return torch.cat([reference.causal_conv(x, layer.weight, layer.bias, silu=False) for x in parts])


def through_windows(
    case: Case, layer: Layer, lengths: tuple[int, ...], next_count: NextCount, *, block_size: int = 64,
    padding: int = 0, device: str = "cpu",
) -> torch.Tensor:  # fmt: skip
    """Compute the layer in steps: in each, sequence s computes its next ``next_count(s, done)`` tokens."""
    states = memory(case, layer.x.dtype, len(lengths) + 1, device=device)
    out = torch.empty_like(layer.x)
    for step in steps(lengths, next_count):
        slots = [s + 1 for s in step.sequences]
        context = step_context(
            step.counts, step.starts, slots, states, block_size=block_size, padding=padding, device=device
        )
        result = layer.rows(step.rows, padding, device).run(context).cpu()
        assert not result[len(step.rows) :].any(), "padding rows must be zero"
        out[step.rows] = result[: len(step.rows)]
    return out
