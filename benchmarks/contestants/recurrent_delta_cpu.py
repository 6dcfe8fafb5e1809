"""Run the peer of the exact decode step of Gated DeltaNet: the plain delta rule, one token a sequence, same style.

The layout of the state, the vectors, the prefetch and the threads are those of `samebit.kernels.cpu.delta.rule`. What
differs is the algorithm: the state of every head is read and written for every token, a panel of columns at a time,
whose second reading comes from the processor's cache, and there is no tail.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from samebit.benchmarks.contestants.recurrent_cpu import advance, advance_by_row
from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, integers, kind_of, with_unit_stride
from samebit.kernels.cpu.base.numeric import exp, fma, narrow, widen
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.rows import Rows
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.base.small_tiles import FETCH_AHEAD, tile_read
from samebit.kernels.cpu.delta.operation import WORK_AN_ELEMENT
from samebit.kernels.cpu.delta.panels import PANEL, place_in_panel
from samebit.kernels.cpu.delta.tail import normalise
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.memory_pool import zeroed_pool
from samebit.kernels.layout.states.delta import DeltaShape

_PANEL = max(PANEL, 4 * LANES)
"""Columns of the peer's panels, which a key alone reads: its sums leave half of the registers too."""


def _step(threads: int, tensors: Any, sizes: Any, sequences: int, kind: Any) -> None:
    """Step; ``tensors``: addresses of qkv, its stride, those of decay, beta, slots, states, out; ``sizes``: Hk, Hv, K,
    V, and whether each channel of a key decays by itself."""
    share_out(_step_part, threads, threads, (threads, tensors, sizes, sequences, kind))


@kernel_part
def _step_part(part: int, parts: int, tensors: Any, sizes: Any, sequences: int, kind: Any) -> None:
    key_heads, value_heads, key_dim, value_dim, by_channel = sizes
    items = sequences * key_heads
    qkv, out = elements(tensors[0], NO_END, kind), elements(tensors[6], NO_END, kind)
    stride, decay, beta = tensors[1], floats(tensors[2], NO_END), floats(tensors[3], NO_END)
    slots, states = integers(tensors[4], sequences), floats(tensors[5], NO_END)
    wide, share = -(-value_dim // LANES) * LANES, value_heads // key_heads
    query = np.empty(-(-key_dim // LANES) * LANES, np.float32)
    key, read, total = np.empty(len(query), np.float32), np.empty(wide, np.float32), np.empty(wide, np.float32)
    scale = np.float32(1) / np.sqrt(np.float32(key_dim))
    keeps, keyed = np.empty(key_dim, np.float32), np.empty(key_dim, np.float32)
    for item in range(items * part // parts, items * (part + 1) // parts):
        row, key_head = item // key_heads, item % key_heads
        first = row * stride + key_head * key_dim
        normalise(qkv[first : first + key_dim], scale, query)
        first += key_heads * key_dim
        normalise(qkv[first : first + key_dim], np.float32(1), key)
        if by_channel:
            first = (row * key_heads + key_head) * key_dim
            for n in range(key_dim):
                keeps[n] = exp(decay[first + n])
                keyed[n] = key[n] * keeps[n]
        for head in range(key_head * share, (key_head + 1) * share):
            first = row * stride + 2 * key_heads * key_dim + head * value_dim
            place = (row * value_heads + head) * value_dim
            if by_channel:
                _channels(
                    qkv[first : first + value_dim], keeps, beta[row * value_heads + head], key, keyed, query, states,
                    (slots[row] * value_heads + head) * key_dim * wide, read, total, out[place : place + value_dim],
                )  # fmt: skip
                continue
            _head(
                qkv[first : first + value_dim], exp(decay[row * value_heads + head]), beta[row * value_heads + head],
                key, query, key_dim, states, (slots[row] * value_heads + head) * key_dim * wide, read, total,
                out[place : place + value_dim],
            )  # fmt: skip


@kernel_part
def _head(
    value: Any, decay: Any, beta: Any, key: Any, query: Any, key_dim: int, states: Any, at: int, read: Any, total: Any,
    out: Any,
) -> None:  # fmt: skip
    wide, value_dim = len(read), len(value)
    v = 0
    while v < wide:
        place, stride, left = place_in_panel(v, key_dim, wide, _PANEL)
        columns = 8 if left >= 8 else (4 if left >= 4 else (2 if left >= 2 else 1))
        tile_read(1, columns, Rows(key, 0, 0), Rows(states, at + place, stride), key_dim, Rows(read, v, 0), FETCH_AHEAD)
        for p in range(v, min(v + columns * LANES, value_dim)):
            read[p] = fma(-decay, read[p], widen(value[p])) * beta
        for p in range(max(v, value_dim), v + columns * LANES):
            read[p] = 0
        advance(columns, decay, read[v:], key, query, key_dim, states, at + place, stride, total[v:])
        v += columns * LANES
    for p in range(value_dim):
        out[p] = narrow(total[p], out[p])


@kernel_part
def _channels(
    value: Any, keeps: Any, beta: Any, key: Any, keyed: Any, query: Any, states: Any, at: int, read: Any, total: Any,
    out: Any,
) -> None:  # fmt: skip
    """Do as `_head` with a decay for each channel; ``keyed``: the key times it."""
    wide, value_dim, key_dim = len(read), len(value), len(keeps)
    v = 0
    while v < wide:
        place, stride, left = place_in_panel(v, key_dim, wide, _PANEL)
        columns = 8 if left >= 8 else (4 if left >= 4 else (2 if left >= 2 else 1))
        tile_read(
            1, columns, Rows(keyed, 0, 0), Rows(states, at + place, stride), key_dim, Rows(read, v, 0), FETCH_AHEAD
        )  # fmt: skip
        for p in range(v, min(v + columns * LANES, value_dim)):
            read[p] = (widen(value[p]) - read[p]) * beta
        for p in range(max(v, value_dim), v + columns * LANES):
            read[p] = 0
        advance_by_row(columns, keeps, read[v:], key, query, key_dim, states, at + place, stride, total[v:])
        v += columns * LANES
    for p in range(value_dim):
        out[p] = narrow(total[p], out[p])


_kernel = SharedKernel(_step)


@dataclass(frozen=True, eq=False)
class DeltaRecurrence:
    """Holds the states ``[slots, Hv, K, V]`` of one layer, V in whole vectors, and steps some of them."""

    shape: DeltaShape
    states: torch.Tensor

    @classmethod
    def empty(cls, shape: DeltaShape, slots: int) -> "DeltaRecurrence":
        return cls(shape, zeroed_pool((slots, *shape.state_sizes), torch.float32))

    def step(self, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Compute one token a sequence: as `samebit.kernels.ops.delta.rule`; row s is that of ``slots[s]``."""
        shape = self.shape
        (qkv, stride), decay, beta = with_unit_stride(qkv), decay.contiguous(), beta.contiguous()
        out = torch.empty(len(qkv), shape.inner, dtype=qkv.dtype)
        tensors = qkv.data_ptr(), stride, *(t.data_ptr() for t in (decay, beta, slots, self.states, out))
        _kernel(
            int(len(qkv) * shape.inner * shape.key_dim * WORK_AN_ELEMENT), tensors,
            (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.by_channel), len(qkv),
            kind_of(qkv.dtype),
        )  # fmt: skip
        return out
