"""Give tests recurrent layers that compute tokens behind a sequence's end, some of which are taken back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import SCAN_CHUNK
from samebit.kernels.layout.states.conv import ConvShape
from samebit.kernels.layout.states.delta import DeltaShape
from samebit.kernels.layout.states.mamba import SSMShape

from . import conv_layer, delta_layer, mamba_layer
from .helpers import memory
from .mamba_layer import step_context


@dataclass(frozen=True)
class Kind:
    """Says how a layer of some kind is made and run, of which sizes, and how many tokens it guesses at most."""

    case: Any
    make: Callable[..., Any]
    run: Callable[[Any, ForwardContext, Any], torch.Tensor]
    guesses: int


def _conv(shape: ConvShape, chunk: int, guesses: int) -> Kind:
    case = conv_layer.Case(shape, biased=True, chunk=chunk)
    return Kind(case, conv_layer.layer_of, lambda layer, context, _: layer.run(context), guesses)


def _mamba(shape: SSMShape, chunk: int, guesses: int) -> Kind:
    case = mamba_layer.Case(shape, chunk)
    return Kind(case, mamba_layer.layer_of, lambda layer, context, case: layer.run(context, case.options), guesses)


def _delta(shape: DeltaShape, chunk: int, guesses: int) -> Kind:
    case = delta_layer.Case(shape, chunk)
    return Kind(case, delta_layer.layer_of, lambda layer, context, case: layer.run(context, case), guesses)


KINDS = {
    "convolution, three taps": _conv(ConvShape(37, 3), 16, 14),
    "convolution, two taps": _conv(ConvShape(200, 2), 32, 3),
    "Mamba2, four taps": _mamba(SSMShape(4, 24, 2, 100, 4), 16, 13),
    "Mamba2, two taps": _mamba(SSMShape(3, 17, 1, 7, 2), 32, 15),
    "delta rule, four taps": _delta(DeltaShape(2, 4, 24, 40, 4), 32, 15),
    "delta rule, three taps": _delta(DeltaShape(1, 2, 36, 16, 3), 16, 5),
}
"""Names kinds of layers with sizes, and guesses: as many as their windows allow, or fewer."""


class Guessing:
    """Computes one sequence of a layer token by token, with guesses behind each: some right, the others wrong.

    Each state as of a block boundary is kept, those that a step takes and the last one of what stops. wrong: what wrong
    tokens hold.
    """

    def __init__(self, kind: Kind, dtype: torch.dtype, length: int, *, wrong: float, block: int, device: str) -> None:
        self.kind, self.length, self.wrong, self.block, self.device = kind, length, wrong, block, device
        self.layer = kind.make(kind.case, dtype, (length,))
        self.states = memory(kind.case, dtype, 3, 2 * (length // block), device=device, guesses=kind.guesses)
        self.kept: list[tuple[int, int]] = []

    def run(self, start: int, right: int, wrong: int = 0, slot: int = 1) -> torch.Tensor:
        """Compute so many of the sequence's tokens from ``start`` on, and wrong ones behind them."""
        boundary = (start + right) // self.block * self.block
        captures = [(0, boundary, len(self.kept))] if slot == 1 and boundary > start else []
        self.kept += [(boundary, capture[2]) for capture in captures]
        context = step_context(
            [right + wrong], [start], [slot], self.states, block_size=self.block, captures=captures, device=self.device
        )
        layer = self.layer.rows(np.arange(start, start + right), wrong, self.device)
        for part in vars(layer).values():
            part[part.isnan()] = self.wrong
        return self.kind.run(layer, context, self.kind.case)[:right].cpu()

    def run_all(self, rng: np.random.Generator) -> torch.Tensor:
        """Compute all, and a copy of the sequence from a place in the middle on; check all states that were kept."""
        start = int(rng.integers(1, 20))
        parts, copied = [self.run(0, start)], 0
        while start < self.length:
            room = SCAN_CHUNK - 1 - (start + 1) % SCAN_CHUNK
            guessed = min(int(rng.integers(self.kind.guesses + 1)), room)
            right = 1 + min(int(rng.integers(guessed + 1)), self.length - start - 1)
            parts.append(self.run(start, right, 1 + guessed - right))
            start += right
            if not copied and start > self.length // 2:
                self.states.copy_slots([(1, 0)])
                copied = start
            if start // self.block > (start - right) // self.block:
                self.states.take_checkpoints([(1, len(self.kept))])
                self.kept.append((start // self.block * self.block, len(self.kept)))
        out = torch.cat(parts)
        assert torch.equal(self.run(copied, self.length - copied, slot=0), out[copied:])
        for position, checkpoint in self.kept:
            self.states.restore_checkpoints([(checkpoint, 2)])
            found = [self.run(at, 1, slot=2) for at in range(position, min(position + 5, self.length))]
            assert torch.equal(torch.cat(found), out[position : position + 5]), position
        assert {position for position, _ in self.kept} == set(range(self.block, self.length + 1, self.block))
        return out
