"""Give tests a Gated DeltaNet layer, from convolution to rule: inputs, oracle, and the way through states."""

from dataclasses import dataclass

import numpy as np
import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.options import DeltaOptions
from samebit.kernels.layout.states.delta import DeltaShape
from samebit.kernels.ops.conv import causal_conv
from samebit.kernels.ops.delta.gates import gates
from samebit.kernels.ops.delta.rule import delta_rule

from . import reference
from .helpers import memory
from .mamba_layer import step_context
from .routes import NextCount, steps


@dataclass(frozen=True)
class Case:
    """Holds sizes of a layer, its chunk, and the factor on its strength."""

    shape: DeltaShape
    chunk: int
    beta_scale: float = 1.0

    @property
    def options(self) -> DeltaOptions:
        shape = self.shape
        sizes = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim
        return DeltaOptions(0, self.chunk, *sizes, shape.by_channel)


@dataclass
class Layer:
    """Holds inputs of T rows and the layer's parameters."""

    qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.qkv, self.a, self.b, self.weight, self.a_log, self.dt_bias

    def run(self, context: ForwardContext, case: Case) -> torch.Tensor:
        convolved = causal_conv(self.qkv, self.weight, None, context, 0)
        decay, beta = gates(self.a, self.b, self.a_log, self.dt_bias, case.beta_scale)
        return delta_rule(convolved, decay, beta, context, case.options)

    def rows(self, rows: np.ndarray, padding: int = 0, device: str = "cpu") -> "Layer":
        """Return these rows, and as many of NaN; they are parts of one matrix, as a projection gives them."""
        given = self.tensors[:3]
        joined = torch.cat(given, dim=1)[rows]
        joined = torch.cat([joined, joined.new_full((padding, joined.shape[1]), torch.nan)]).to(device)
        parts = joined.split([part.shape[1] for part in given], dim=1)
        return Layer(*parts, *(part.to(device) for part in self.tensors[3:]))


def layer_of(case: Case, dtype: torch.dtype, lengths: tuple[int, ...]) -> Layer:
    torch.manual_seed(case.shape.key_dim)
    shape, heads = case.shape, case.shape.value_heads
    decays = case.options.decays
    joined = torch.randn(sum(lengths), shape.conv_width + decays + heads).to(dtype)
    qkv, a, b = joined.split([shape.conv_width, decays, heads], dim=1)
    return Layer(
        qkv=qkv,
        a=a,
        b=b,
        weight=torch.randn(shape.conv_width, 1, shape.taps).to(dtype),
        a_log=torch.rand(heads) * 2.7,
        dt_bias=torch.randn(decays) - 3,
    )


def oracle(case: Case, layer: Layer, lengths: tuple[int, ...]) -> torch.Tensor:
    shape = case.shape
    keys = shape.key_heads * shape.key_dim
    out = []
    for qkv, a, b in zip(*(part.split(lengths) for part in layer.tensors[:3]), strict=True):
        parts = reference.causal_conv(qkv, layer.weight).split([keys, keys, shape.inner], -1)
        counts = (shape.key_heads, shape.key_heads, shape.value_heads)
        q, k, v = (part.unflatten(-1, (n, -1)) for part, n in zip(parts, counts, strict=True))
        decay, beta = reference.delta_gates(a, b, layer.a_log, layer.dt_bias, case.beta_scale)
        out.append(reference.delta_rule(q, k, v, decay, beta).flatten(1))
    return torch.cat(out)


def through_states(
    case: Case, layer: Layer, lengths: tuple[int, ...], next_count: NextCount, *, block_size: int = 64,
    padding: int = 0, device: str = "cpu",
) -> torch.Tensor:  # fmt: skip
    """Compute the layer in steps: in each, sequence s computes its next ``next_count(s, done)`` tokens."""
    states = memory(case, layer.qkv.dtype, len(lengths) + 1, device=device)
    out = torch.empty(len(layer.qkv), case.shape.inner, dtype=layer.qkv.dtype)
    for step in steps(lengths, next_count):
        slots = [s + 1 for s in step.sequences]
        context = step_context(
            step.counts, step.starts, slots, states, block_size=block_size, padding=padding, device=device
        )
        result = layer.rows(step.rows, padding, device).run(context, case).cpu()
        assert not result[len(step.rows) :].any(), "padding rows must be zero"
        out[step.rows] = result[: len(step.rows)]
    return out
