"""Compute the gates of the delta rule, an element at a time."""

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.triton.numeric import aligned, jit, sigmoid, softplus
from samebit.kernels.triton.tiles.table import ELEMENTS, power_of_two


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Operations.gates`."""
    a, b = aligned(a), aligned(b)
    decay, beta = (torch.empty(part.shape, dtype=torch.float32, device=a.device) for part in (a, b))
    rows, width = a.shape
    size = min(power_of_two(width), ELEMENTS)
    together = ELEMENTS // size
    if a.numel():
        _gates[(ceil_div(rows, together), ceil_div(width, size))](
            a, b, aligned(a_log), aligned(bias), scale, decay, beta, rows, b.shape[1], width // b.shape[1], together,
            size,
        )  # fmt: skip
    return decay, beta


@jit(do_not_specialize=["scale", "rows"])
def _gates(
    a: tensor, b: tensor, a_log: tensor, bias: tensor, scale: tensor, decay: tensor, beta: tensor, rows: tensor,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of rows and channels: along these only the width, a layer's own, ends a mask."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    channel = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    held = channel < HEADS * CHANNELS
    place, real = row * (HEADS * CHANNELS) + channel[None, :], (row < rows) & held[None, :]
    raw = tl.load(a + place, mask=real, other=0.0).to(tl.float32)
    step = softplus(raw + tl.load(bias + channel, mask=held, other=0.0)[None, :])
    rate = tl.exp(tl.load(a_log + channel // CHANNELS, mask=held, other=0.0))
    tl.store(decay + place, -rate[None, :] * step, mask=real)
    place, real = row * HEADS + channel[None, :], (row < rows) & (channel < HEADS)[None, :]
    tl.store(beta + place, sigmoid(tl.load(b + place, mask=real, other=0.0).to(tl.float32)) * scale, mask=real)
