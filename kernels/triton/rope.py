"""Rotate the first ``2 * R`` elements of each head, and copy the rest.

T tokens, H heads, D head size, R angles.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.triton.numeric import aligned, jit
from samebit.kernels.triton.tiles.table import power_of_two


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """Implement `Operations.rotate`."""
    x = aligned(x)
    tokens, heads, head_dim = x.shape
    half = cos.shape[1]
    out = torch.empty_like(x)
    if x.numel():
        _rotate_token[(tokens,)](
            x, aligned(cos), aligned(sin), out, sign, heads, head_dim, half, power_of_two(heads), power_of_two(half),
            power_of_two(max(1, head_dim - 2 * half)),
        )  # fmt: skip
    return out


def join_rotated(
    x: torch.Tensor, y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neighbours: bool
) -> torch.Tensor:
    """Implement `Operations.join_rotated`."""
    y = y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if neighbours else y
    return torch.cat([x, rotate(y, cos, sin, 1.0)], dim=-1)


@jit()
def turned(first: tensor, second: tensor, c: tensor, s: tensor) -> Any:
    """Rotate pairs; which products are rounded is said here, and not left to the compiler."""
    return tl.fma(first, c, second * -s), tl.fma(second, c, first * s)


@jit(do_not_specialize=["sign"])
def _rotate_token(
    x: tensor, cos: tensor, sin: tensor, out: tensor, sign: tensor, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, PADDED_HEADS: tl.constexpr, PADDED_HALF: tl.constexpr, PADDED_REST: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)[:, None]
    pair = tl.arange(0, PADDED_HALF)
    place = token * (HEADS * HEAD_DIM) + head * HEAD_DIM + pair[None, :]
    real = (head < HEADS) & (pair[None, :] < HALF)
    first = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    second = tl.load(x + place + HALF, mask=real, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    s = sign * tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    left, right = turned(first, second, c, s)
    tl.store(out + place, left.to(out.dtype.element_ty), mask=real)
    tl.store(out + place + HALF, right.to(out.dtype.element_ty), mask=real)
    if HEAD_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, PADDED_REST)
        place = token * (HEADS * HEAD_DIM) + head * HEAD_DIM + rest[None, :]
        real = (head < HEADS) & (rest[None, :] < HEAD_DIM)
        tl.store(out + place, tl.load(x + place, mask=real), mask=real)
