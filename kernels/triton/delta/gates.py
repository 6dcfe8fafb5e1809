"""Compute the gates of the delta rule, an element at a time."""

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.triton.numeric import aligned, jit, sigmoid, softplus
from samebit.kernels.triton.tiles.table import ELEMENTS


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Operations.gates`."""
    a, b = aligned(a), aligned(b)
    decay, beta = (torch.empty(part.shape, device=a.device) for part in (a, b))
    if a.numel():
        _gates[(ceil_div(a.numel(), ELEMENTS),)](
            a,
            b,
            aligned(a_log),
            aligned(bias),
            scale,
            decay,
            beta,
            a.numel(),
            b.numel(),
            b.shape[1],
            a.shape[1] // b.shape[1],
            ELEMENTS,
        )
    return decay, beta


@jit(do_not_specialize=["scale", "count", "count_b"])
def _gates(
    a: tensor, b: tensor, a_log: tensor, bias: tensor, scale: tensor, decay: tensor, beta: tensor, count: tensor,
    count_b: tensor, HEADS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    real, of_b, channel = place < count, place < count_b, place % (HEADS * CHANNELS)
    step = softplus(tl.load(a + place, mask=real, other=0.0).to(tl.float32) + tl.load(bias + channel))
    tl.store(decay + place, -tl.exp(tl.load(a_log + channel // CHANNELS)) * step, mask=real)
    tl.store(beta + place, sigmoid(tl.load(b + place, mask=of_b, other=0.0).to(tl.float32)) * scale, mask=of_b)
