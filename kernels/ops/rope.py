"""Rotate queries and keys by their positions (Su et al. 2021, half-split layout), with autograd; scale queries by them.

Contract: angles are float32 products of a position and a frequency computed from the model's config, never
from a module's buffer (``.to(bfloat16)`` truncates those); the rotation runs in float32 and rounds once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.shape_checks import check_dtype, check_dtype_of_cpu, check_host, check_shape
from samebit.kernels.ops.dispatch import operations_for

_MOST_POSITIONS = 1 << 24
"""Float32 tells no more of them apart: angles of later ones would be those of others."""


class RotaryTables:
    """Holds what a bound rotary module hands to the layers: the angles of one forward call, and its layout.

    Riding on an argument of the layer, the layout survives gradient checkpointing: the recomputation gets
    the same object, whatever forward call was made in between and in whichever thread it runs. No dataclass: FSDP2
    casts the tensors of those to the dtype it computes in, and angles stay float32.

    Attributes:
        cos: ``[T, R]`` float32, scaled by the model's attention scaling.
        sin: ``[T, R]`` float32.
        context: the layout of the T rows.
        query_factors: ``[T]`` float32, what queries are multiplied by; None for nothing.
    """

    __slots__ = ("context", "cos", "query_factors", "sin")

    def __init__(
        self, cos: torch.Tensor, sin: torch.Tensor, context: ForwardContext, query_factors: torch.Tensor | None = None
    ) -> None:
        if cos.dim() != 2 or len(cos) != context.num_rows:
            raise ValueError(f"cos has the shape {list(cos.shape)}; allowed: [{context.num_rows}, R]")
        check_shape("sin", sin, *cos.shape)
        check_dtype("cos", cos, torch.float32)
        check_dtype("sin", sin, torch.float32)
        self.cos = cos
        self.sin = sin
        self.context = context
        self.query_factors = query_factors


@dataclass(frozen=True, eq=False)
class QueryFactors:
    """Knows what queries are multiplied by: ``1 + beta log(1 + position // every)`` (Llama 4), in float32.

    All factors are computed at once and looked up: so one of a position is the same number in every call, which torch
    does not promise of logarithms of a call's positions.
    """

    beta: float
    every: int
    _on: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, rope_parameters: Mapping[str, Any]) -> "QueryFactors":
        """Read them from a config."""
        return cls(rope_parameters["llama_4_scaling_beta"], rope_parameters["original_max_position_embeddings"])

    def on(self, device: torch.device) -> torch.Tensor:
        """Return all factors on this device; moved once, because a CUDA graph can not record that."""
        if device not in self._on:
            factors = 1 + self.beta * np.log(np.arange(1.0, _MOST_POSITIONS // self.every + 2))
            self._on[device] = torch.from_numpy(factors.astype(np.float32)).to(device)
        return self._on[device]

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return those of positions ``[T]``."""
        return self.on(positions.device)[positions // self.every]


def scale_queries(q: torch.Tensor, tables: RotaryTables | None) -> torch.Tensor:
    """Multiply all heads of a row of ``q``: ``[T, H, D]`` with the row's factor, in float32, and round once.

    Raises:
        ValueError: no tables, or without factors.
    """
    if tables is None or tables.query_factors is None:
        raise ValueError("no factors on queries come with the angles; allowed: those of a family that scales queries")
    return (q.float() * tables.query_factors[:, None, None]).to(q.dtype)


def rotary_tables(
    inverse_frequencies: torch.Tensor, scaling: float, context: ForwardContext,
    query_factors: torch.Tensor | None = None,
) -> RotaryTables:  # fmt: skip
    """Compute the angles of the context's positions; ``inverse_frequencies``: ``[R]`` float32 on their device."""
    return RotaryTables(*angles_of(context.positions, inverse_frequencies, scaling), context, query_factors)


def angles_of(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines ``[T, R]`` of positions ``[T]``, or ``[T, R]`` where each frequency has its own: an
    element depends on its own position alone."""
    given = positions.to(torch.float32)
    angles = (given[:, None] if given.dim() == 1 else given) * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)


def rotate(x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Rotate the first ``2 R`` elements of every head of ``x``: ``[T, H, D]``; the others are copied.

    Raises:
        ValueError: another number of rows than of angles, or heads of fewer elements than are rotated.
    """
    check_rotation("x", x, tables)
    if torch.is_grad_enabled() and x.requires_grad:
        rotated: torch.Tensor = _Rotate.apply(x, tables)
        return rotated
    return operations_for(x).rotate(x, tables.cos, tables.sin, 1.0)


def in_halves(x: torch.Tensor) -> torch.Tensor:
    """Put elements ``[..., 2 R]`` that are rotated together, neighbours, R apart."""
    halves: torch.Tensor = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves


def heads_in_halves(x: torch.Tensor, angles: int) -> torch.Tensor:
    """Put the first elements of every head of ``x`` ``[T, H, D]``, neighbours that are rotated together by as many
    ``angles``, that far apart, as `rotate` takes them; the others stay where they are.

    Scores of queries and keys that both lie so are those of neighbours, but for the order in which they are summed.
    """
    turned = in_halves(x[..., : 2 * angles])
    return turned if x.shape[-1] == 2 * angles else torch.cat([turned, x[..., 2 * angles :]], dim=-1)


def join_rotated(x: torch.Tensor, y: torch.Tensor, tables: RotaryTables, neighbours: bool) -> torch.Tensor:
    """Return ``[T, H, W + 2 R]``: ``x`` ``[T, H, W]``, and behind it ``y`` ``[T, H, 2 R]``, rotated as halves.

    Without gradients by one kernel. ``neighbours``: elements of ``y`` that are rotated together stand side by side.

    Raises:
        ValueError: another number of rows than of angles, heads that differ, or elements that are not rotated.
        TypeError: dtypes that differ.
    """
    check_rotation("y", y, tables)
    rows, heads, size = y.shape
    if x.dim() != 3 or x.shape[:2] != y.shape[:2] or size != 2 * tables.cos.shape[1]:
        raise ValueError(
            f"x has the shape {list(x.shape)} and y {list(y.shape)}; allowed: [{rows}, {heads}, W] and [{rows}, "
            f"{heads}, {2 * tables.cos.shape[1]}]"
        )
    if x.dtype is not y.dtype:
        raise TypeError(f"x is {x.dtype} and y {y.dtype}; allowed: two alike")
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        return torch.cat([x, rotate(in_halves(y) if neighbours else y, tables)], dim=-1)
    return operations_for(x).join_rotated(x, y, tables.cos, tables.sin, neighbours)


def check_rotation(name: str, x: torch.Tensor, tables: RotaryTables) -> None:
    """Raise ValueError unless there are angles for each row of ``x``: ``[T, H, D]``, and elements for them to turn."""
    rows, half = tables.cos.shape
    if x.dim() != 3 or x.shape[0] != rows or x.shape[2] < 2 * half:
        raise ValueError(
            f"{name} has the shape {list(x.shape)}; allowed with {rows} rows of {half} angles: [{rows}, heads, D], D "
            f"at least {2 * half}"
        )
    if not device.on_gpu(x):
        check_dtype_of_cpu(x.dtype)
        check_host("cos", tables.cos)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(x)
        ctx.tables = tables
        return kernels.rotate(x, tables.cos, tables.sin, 1.0)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.kernels.rotate(grad, ctx.tables.cos, ctx.tables.sin, -1.0), None
