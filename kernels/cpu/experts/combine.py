"""Add up a row's outputs on the CPU, and hand its gradient to each of them; a row is one thread's.

Invariant: a sum over a row's experts goes in the order of its ids, one chain of fused multiply-adds from 0.

T rows of width W.
"""

from typing import Any

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import SharedKernel, array
from samebit.kernels.cpu.base.numeric import fma, narrow, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.layout.grids import LANES

_ZERO = np.float32(0.0)


def combine(outputs: torch.Tensor, place_of: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums ``[T, W]`` of the outputs ``[T top_k, W]`` at each row's places."""
    out = outputs.new_empty(len(place_of), outputs.shape[1])
    _add_up(outputs.numel(), array(outputs), array(place_of), array(weights.contiguous()), array(out))
    return out


def add_up(outputs: torch.Tensor, place_of: torch.Tensor) -> torch.Tensor:
    """Return the sums ``[T, W]`` of what lies at each row's places."""
    return combine(outputs, place_of, torch.ones(place_of.shape, dtype=torch.float32, device="cpu"))


def combine_backward(
    grad: torch.Tensor, outputs: torch.Tensor, place_of: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the outputs ``[T top_k, W]`` and of the weights ``[T, top_k]``."""
    of_outputs, of_weights = torch.empty_like(outputs), torch.empty_like(weights, memory_format=torch.contiguous_format)
    _hand_back(
        outputs.numel(), array(grad.contiguous()), array(outputs), array(place_of), array(weights.contiguous()),
        array(of_outputs), array(of_weights),
    )  # fmt: skip
    return of_outputs, of_weights


@inlined_part
def add_up_rows(threads: int, outputs: Any, place_of: Any, weights: Any, out: Any) -> None:
    """Write the weighted sums ``[T, W]``, as arrays."""
    share_out(_add_up_row, len(place_of), threads, (outputs, place_of, weights, out))


@kernel_part
def _add_up_row(row: int, outputs: Any, place_of: Any, weights: Any, out: Any) -> None:
    choices = place_of.shape[1]
    to = out[row]
    sums = np.zeros(len(to), np.float32)
    for choice in range(choices):
        weight, output = weights[row, choice], outputs[place_of[row, choice]]
        for i in range(len(sums)):
            sums[i] = fma(weight, widen(output[i]), sums[i])
    for i in range(len(sums)):
        to[i] = narrow(sums[i], to[i])


def _hand_back_rows(
    threads: int, grad: Any, outputs: Any, place_of: Any, weights: Any, of_outputs: Any, of_weights: Any,
) -> None:  # fmt: skip
    share_out(_hand_back_row, len(place_of), threads, (grad, outputs, place_of, weights, of_outputs, of_weights))


@kernel_part
def _hand_back_row(
    row: int, grad: Any, outputs: Any, place_of: Any, weights: Any, of_outputs: Any, of_weights: Any,
) -> None:  # fmt: skip
    choices = place_of.shape[1]
    upstream = grad[row]
    lanes = np.empty(LANES, np.float32)
    for choice in range(choices):
        place = place_of[row, choice]
        weight, output, to = weights[row, choice], outputs[place], of_outputs[place]
        lanes[:] = _ZERO
        for first in range(0, len(to), LANES):
            for lane in range(min(LANES, len(to) - first)):
                d = widen(upstream[first + lane])
                lanes[lane] = fma(d, widen(output[first + lane]), lanes[lane])
                to[first + lane] = narrow(weight * d, to[0])
        total = _ZERO
        for lane in range(LANES):
            total += lanes[lane]
        of_weights[row, choice] = total


def _combine(threads: int, outputs: Any, place_of: Any, weights: Any, out: Any) -> None:
    add_up_rows(threads, outputs, place_of, weights, out)


_add_up = SharedKernel(_combine)
_hand_back = SharedKernel(_hand_back_rows)
