"""Run the peer of the exact decode of a Mamba2 layer on a GPU: the plain recurrence, one token a sequence, in one
kernel.

It reads and writes the state of every head once, which is the least that a recurrent step can do.
"""

import torch
import triton
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.states.mamba import SSMShape
from samebit.kernels.triton.numeric import softplus
from samebit.kernels.triton.tiles.table import power_of_two

_COLUMNS = 32
"""Count of elements of a head that a program takes."""


def recurrent_step(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    slots: torch.Tensor,
    states: torch.Tensor,
    shape: SSMShape,
) -> torch.Tensor:
    """Compute one token a sequence. Arguments: as `samebit.kernels.ops.ssd.scan`; row s is that of ``slots[s]``.

    ``states``: ``[slots, H, N, P]`` float32.
    """
    out = torch.empty(len(xbc), shape.inner, dtype=xbc.dtype, device=xbc.device)
    columns = min(_COLUMNS, power_of_two(shape.head_dim))
    _advance[(len(xbc), shape.heads, triton.cdiv(shape.head_dim, columns))](
        xbc, dt, decay_rate, dt_bias, skip, slots, states, out, shape.heads, shape.head_dim, shape.groups,
        shape.state_size, columns, power_of_two(shape.state_size), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _advance(
    xbc: tensor, dt: tensor, decay_rate: tensor, dt_bias: tensor, skip: tensor, slots: tensor, states: tensor,
    out: tensor, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, PADDED_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    n = tl.arange(0, PADDED_SIZE)
    inner = HEADS * HEAD_DIM
    source = xbc + row * (inner + 2 * GROUPS * STATE_SIZE)
    group = head // (HEADS // GROUPS)
    x = tl.load(source + head * HEAD_DIM + p, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
    b = tl.load(source + inner + group * STATE_SIZE + n, mask=n < STATE_SIZE, other=0.0).to(tl.float32)
    c = tl.load(source + inner + (GROUPS + group) * STATE_SIZE + n, mask=n < STATE_SIZE, other=0.0).to(tl.float32)
    step = softplus(tl.load(dt + row * HEADS + head).to(tl.float32) + tl.load(dt_bias + head))
    slot = tl.load(slots + row).to(tl.int64)
    place = states + ((slot * HEADS + head) * STATE_SIZE + n[:, None]) * HEAD_DIM + p[None, :]
    held = (n[:, None] < STATE_SIZE) & (p[None, :] < HEAD_DIM)
    state = tl.load(place, mask=held, other=0.0) * tl.exp(step * tl.load(decay_rate + head))
    state += b[:, None] * (x * step)[None, :]
    tl.store(place, state, mask=held)
    result = tl.sum(state * c[:, None], axis=0) + tl.load(skip + head) * x
    tl.store(out + row * inner + head * HEAD_DIM + p, result.to(out.dtype.element_ty), mask=p < HEAD_DIM)
