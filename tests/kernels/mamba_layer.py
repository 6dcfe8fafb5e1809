"""Give tests the convolution and the scan of a Mamba2 layer: inputs, oracle, and the way through states."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.options import SSMOptions
from samebit.kernels.layout.states.mamba import SSMShape
from samebit.kernels.layout.states.memory import StateMemory
from samebit.kernels.ops.conv import causal_conv
from samebit.kernels.ops.ssd import scan

from . import reference
from .helpers import memory
from .routes import NextCount, steps


@dataclass(frozen=True)
class Case:
    """Holds sizes of a layer and its chunk."""

    shape: SSMShape
    chunk: int
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def options(self) -> SSMOptions:
        return SSMOptions(0, self.chunk, self.shape.groups, self.shape.state_size, self.dt_limits)


@dataclass
class Layer:
    """Holds inputs of T rows and the layer's parameters."""

    x: torch.Tensor
    dt: torch.Tensor
    weight: torch.Tensor
    conv_bias: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return self.decay_rate, self.dt_bias, self.skip

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.dt, self.weight, self.conv_bias, *self.parameters

    def run(self, context: ForwardContext, options: SSMOptions) -> torch.Tensor:
        convolved = causal_conv(self.x, self.weight, self.conv_bias, context, options.layer)
        return scan(convolved, self.dt, *self.parameters, context, options)

    def rows(self, rows: np.ndarray, padding: int = 0, device: str = "cpu") -> "Layer":
        """Return these rows, and as many of NaN; x and dt are parts of one matrix, as a projection gives them."""
        joined = torch.cat([self.x, self.dt], dim=1)[rows]
        joined = torch.cat([joined, joined.new_full((padding, joined.shape[1]), torch.nan)]).to(device)
        x, dt = joined.split([self.x.shape[1], self.dt.shape[1]], dim=1)
        return Layer(x, dt, *(part.to(device) for part in self.tensors[2:]))


def layer_of(case: Case, dtype: torch.dtype, lengths: tuple[int, ...]) -> Layer:
    torch.manual_seed(case.shape.head_dim)
    shape = case.shape
    joined = torch.randn(sum(lengths), shape.conv_width + shape.heads).to(dtype)
    return Layer(
        x=joined[:, : shape.conv_width],
        dt=joined[:, shape.conv_width :],
        weight=torch.randn(shape.conv_width, 1, shape.taps).to(dtype),
        conv_bias=torch.randn(shape.conv_width).to(dtype),
        decay_rate=-torch.rand(shape.heads) * 4,
        dt_bias=torch.randn(shape.heads) - 2,
        skip=torch.randn(shape.heads),
    )


def oracle(case: Case, layer: Layer, lengths: tuple[int, ...]) -> torch.Tensor:
    shape = case.shape
    sizes = [shape.inner, shape.groups * shape.state_size, shape.groups * shape.state_size]
    out = []
    for x, dt in zip(layer.x.split(lengths), layer.dt.split(lengths), strict=True):
        parts = reference.causal_conv(x, layer.weight, layer.conv_bias).split(sizes, -1)
        counts = (shape.heads, shape.groups, shape.groups)
        heads, b, c = (part.unflatten(-1, (n, -1)) for part, n in zip(parts, counts, strict=True))
        out.append(reference.ssm_scan(heads, b, c, dt, *layer.parameters, case.dt_limits).flatten(1))
    return torch.cat(out)


def step_context(
    counts: Sequence[int], starts: Sequence[int], slots: Sequence[int], states: StateMemory, *, block_size: int = 64,
    captures: Sequence[tuple[int, int, int]] = (), padding: int = 0, device: str = "cpu",
) -> ForwardContext:  # fmt: skip
    ends = np.cumsum(counts)
    blocks = 1 + max(start + count for start, count in zip(starts, counts, strict=True)) // block_size
    return ForwardContext(
        positions=torch.zeros(int(ends[-1]) + padding, dtype=torch.int64, device=device),
        row_start=(ends - counts).astype(np.int32),
        lengths=np.array(counts, np.int32),
        starts=np.array(starts, np.int32),
        table_rows=np.array(slots, np.int32),
        block_tables=np.zeros((max(slots) + 1, blocks), np.int32),
        block_size=block_size,
        states=states,
        captures=np.array(captures, np.int32).reshape(-1, 3),
    )


def through_states(
    case: Case, layer: Layer, lengths: tuple[int, ...], next_count: NextCount, *, block_size: int = 64,
    padding: int = 0, device: str = "cpu",
) -> torch.Tensor:  # fmt: skip
    """Compute the layer in steps: in each, sequence s computes its next ``next_count(s, done)`` tokens."""
    states = memory(case, layer.x.dtype, len(lengths) + 1, device=device)
    out = torch.empty(len(layer.x), case.shape.inner, dtype=layer.x.dtype)
    for step in steps(lengths, next_count):
        slots = [s + 1 for s in step.sequences]
        context = step_context(
            step.counts, step.starts, slots, states, block_size=block_size, padding=padding, device=device
        )
        result = layer.rows(step.rows, padding, device).run(context, case.options).cpu()
        assert not result[len(step.rows) :].any(), "padding rows must be zero"
        out[step.rows] = result[: len(step.rows)]
    return out
