"""Run the peer of the exact decode step: the plain Mamba2 recurrence, one token a sequence, in the same style.

The layout of the state, the vectors, the prefetch and the threads are those of
`samebit.kernels.cpu.ssd.scan`. What differs is the algorithm: the state of every head is read
and written for every token, in one pass, and there is no tail. A thread takes neighbouring heads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from samebit.kernels.cpu.base import numeric
from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, integers, kind_of, with_unit_stride
from samebit.kernels.cpu.base.numeric import exp, narrow, softplus, widen
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.base.small_tiles import FETCH_AHEAD
from samebit.kernels.cpu.base.vectors import (
    REGISTERS,
    accumulate,
    fma,
    load_vector,
    pointer_to,
    prefetch,
    splat,
    store_vector,
    zeros,
)
from samebit.kernels.cpu.ssd.operation import WORK_AN_ELEMENT
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.memory_pool import zeroed_pool
from samebit.kernels.layout.states.mamba import SSMShape


def _advance(by_row: bool) -> Any:
    """Make a micro-kernel: ``S[n] = decay S[n] + keys[n] inputs;  out = sum over n of queries[n] S[n]`` on 16 to 128
    columns; ``decay`` is one number, or one for each row n.

    What comes is asked for meanwhile: the rows some KiB ahead, or, which was faster with AVX2, the next columns.
    """

    @intrinsic
    def kernel(
        typingctx: Any, columns: Any, decay: Any, inputs: Any, keys: Any, queries: Any, count: Any, state: Any,
        state_at: Any, stride: Any, out: Any,
    ) -> Any:  # fmt: skip
        i64 = types.int64
        signature = types.void(
            i64, decay if by_row else types.float32, inputs, keys, queries, i64, state, i64, i64, out
        )

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            wide, factor, x, b, c, n, matrix, at, step, target = args
            index = wide.type
            _, decay_type, x_type, b_type, c_type, _, state_type, _, _, out_type = signature.args
            start = pointer_to(context, builder, state_type, matrix, at)
            b_at = pointer_to(context, builder, b_type, b, index(0))
            c_at = pointer_to(context, builder, c_type, c, index(0))

            def emit(column_count: int) -> None:
                lanes = [index(LANES * place) for place in range(column_count)]
                fed = [
                    load_vector(builder, pointer_to(context, builder, x_type, x, lane), types.float32) for lane in lanes
                ]
                every = None if by_row else splat(builder, factor)
                ahead, asked = (index(FETCH_AHEAD), lanes) if REGISTERS == 32 else (builder.mul(n, step), lanes[::2])

                def body(i: Any, sums: list[Any]) -> list[Any]:
                    row = builder.gep(start, [builder.mul(i, step)])
                    of_row = pointer_to(context, builder, decay_type, factor, i) if by_row else None
                    kept = splat(builder, builder.load(of_row)) if by_row else every
                    key, query = (splat(builder, builder.load(builder.gep(part, [i]))) for part in (b_at, c_at))
                    totals = []
                    for lane, inputs_here, total in zip(lanes, fed, sums, strict=True):
                        place = builder.gep(row, [lane])
                        if lane in asked:
                            prefetch(builder, builder.gep(place, [ahead]))
                        old = load_vector(builder, place, types.float32)
                        new = fma(builder, key, inputs_here, builder.fmul(old, kept))
                        store_vector(builder, new, place)
                        totals.append(fma(builder, query, new, total))
                    return totals

                for lane, total in zip(lanes, accumulate(builder, n, [zeros()] * column_count, body), strict=True):
                    store_vector(builder, total, pointer_to(context, builder, out_type, target, lane))

            for column_count in (1, 2, 4, 8):
                with builder.if_then(builder.icmp_signed("==", wide, index(column_count))):
                    emit(column_count)
            return context.get_dummy_value()

        return signature, generate

    return kernel


advance = _advance(by_row=False)
advance_by_row = _advance(by_row=True)


def _step(
    threads: int, xbc_at: int, xbc_stride: int, dt_at: int, dt_stride: int, rate_at: int, bias_at: int, skip_at: int,
    slots_at: int, sequences: int, heads: int, head_dim: int, groups: int, state_size: int, states_at: int, out_at: int,
    kind: Any,
) -> None:  # fmt: skip
    share_out(
        _step_part, threads, threads,
        (
            threads, xbc_at, xbc_stride, dt_at, dt_stride, rate_at, bias_at, skip_at, slots_at, sequences, heads,
            head_dim, groups, state_size, states_at, out_at, kind,
        ),
    )  # fmt: skip


@kernel_part
def _step_part(
    part: int, parts: int, xbc_at: int, xbc_stride: int, dt_at: int, dt_stride: int, rate_at: int, bias_at: int,
    skip_at: int, slots_at: int, sequences: int, heads: int, head_dim: int, groups: int, state_size: int,
    states_at: int, out_at: int, kind: Any,
) -> None:  # fmt: skip
    xbc, dt, out = elements(xbc_at, NO_END, kind), elements(dt_at, NO_END, kind), elements(out_at, NO_END, kind)
    decay_rate, dt_bias, skip = floats(rate_at, heads), floats(bias_at, heads), floats(skip_at, heads)
    slots, states = integers(slots_at, sequences), floats(states_at, NO_END)
    inner, shared = heads * head_dim, groups * state_size
    x = np.empty(-(-head_dim // LANES) * LANES, np.float32)
    total = np.empty(len(x), np.float32)
    keys, queries = np.empty(state_size, np.float32), np.empty(state_size, np.float32)
    items = sequences * heads
    for item in range(items * part // parts, items * (part + 1) // parts):
        row, head = item // heads, item % heads
        _head(
            xbc[row * xbc_stride : row * xbc_stride + inner + 2 * shared], dt[row * dt_stride + head], decay_rate,
            dt_bias, skip, head, slots[row], head_dim, groups, state_size, states, x, keys, queries, total,
            out[row * inner : (row + 1) * inner],
        )  # fmt: skip


@kernel_part
def _head(
    xbc: Any, dt: Any, decay_rate: Any, dt_bias: Any, skip: Any, head: int, slot: int, head_dim: int, groups: int,
    state_size: int, states: Any, x: Any, keys: Any, queries: Any, total: Any, out: Any,
) -> None:  # fmt: skip
    heads, wide = len(decay_rate), len(x)
    inner = heads * head_dim
    group = head // (heads // groups)
    step = softplus(widen(dt) + dt_bias[head])
    source = xbc[head * head_dim : (head + 1) * head_dim]
    for p in range(head_dim):
        x[p] = widen(source[p]) * step
    for p in range(head_dim, wide):
        x[p] = 0
    for n in range(state_size):
        keys[n] = widen(xbc[inner + group * state_size + n])
        queries[n] = widen(xbc[inner + (groups + group) * state_size + n])
    at = (slot * heads + head) * state_size * wide
    decay = exp(step * decay_rate[head])
    v = 0
    while v < wide:
        left = (wide - v) // LANES
        columns = 4 if left >= 4 else (2 if left >= 2 else 1)
        advance(columns, decay, x[v:], keys, queries, state_size, states, at + v, wide, total[v:])
        v += columns * LANES
    result = out[head * head_dim : (head + 1) * head_dim]
    for p in range(head_dim):
        result[p] = narrow(numeric.fma(skip[head], widen(source[p]), total[p]), result[p])


_kernel = SharedKernel(_step)


@dataclass(frozen=True, eq=False)
class Recurrence:
    """Holds the states ``[slots, H, N, P]`` of one layer, P in whole vectors, and steps some of them."""

    shape: SSMShape
    states: torch.Tensor

    @classmethod
    def empty(cls, shape: SSMShape, slots: int) -> "Recurrence":
        return cls(shape, zeroed_pool((slots, shape.heads, shape.state_size, shape.padded_dim), torch.float32))

    def step(
        self,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        decay_rate: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one token a sequence. Arguments: as `samebit.kernels.ops.ssd.scan`; row s is that of ``slots[s]``."""
        shape = self.shape
        rows, heads = len(xbc), shape.heads
        (xbc, stride), (dt, dt_stride) = with_unit_stride(xbc), with_unit_stride(dt)
        decay_rate, dt_bias, skip = decay_rate.contiguous(), dt_bias.contiguous(), skip.contiguous()
        out = torch.empty(rows, shape.inner, dtype=xbc.dtype)
        _kernel(
            int(rows * shape.inner * shape.state_size * WORK_AN_ELEMENT), xbc.data_ptr(), stride, dt.data_ptr(),
            dt_stride, decay_rate.data_ptr(), dt_bias.data_ptr(), skip.data_ptr(), slots.data_ptr(), rows, heads,
            shape.head_dim, shape.groups, shape.state_size, self.states.data_ptr(), out.data_ptr(),
            kind_of(xbc.dtype),
        )  # fmt: skip
        return out
