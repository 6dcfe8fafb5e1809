"""Measure the exact decode step of a Mamba layer beside the plain recurrent one, both from the projection's output on.

They take turns step by step, so that what slows the machine slows both. A round is one whole block of tokens: every
position of the chunk's tail counts once, and so does each move of the state and the copy of it at the block's end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from samebit.benchmarks.contestants.recurrent_cpu import Recurrence
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.options import SSMOptions
from samebit.kernels.layout.states.mamba import SSMShape
from samebit.kernels.layout.states.memory import StateLayout, StateMemory
from samebit.kernels.ops.conv import causal_conv
from samebit.kernels.ops.ssd import scan

BLOCK = 64


@dataclass(frozen=True)
class Sizes:
    """Sets the size of the measurement: several layers in turn, so that no state stays in the processor's cache.

    rounds: with the most sequences; with fewer there are up to ten times as many, which are shorter.
    """

    shape: SSMShape
    layers: int = 4
    sequences: tuple[int, ...] = (1, 16, 64)
    rounds: int = 7


@dataclass
class Seconds:
    """Holds the seconds of one side's steps in a round: whole steps, and their scans."""

    whole: float = 0.0
    scans: float = 0.0


class Layers:
    """Holds some Mamba layers with random inputs and parameters, and two memories: of the exact step and of its
    peer."""

    def __init__(self, sizes: Sizes, sequences: int) -> None:
        shape = sizes.shape
        layout = StateLayout(sizes.layers, shape, BLOCK)
        generator = torch.Generator().manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        self.slots = np.arange(sequences, dtype=np.int32)
        self.exact, self.windows = (layout.allocate(sequences, torch.float32) for _ in range(2))
        self.recurrences = [Recurrence.empty(shape, sequences) for _ in range(sizes.layers)]
        self.options = [SSMOptions(layer, BLOCK, shape.groups, shape.state_size) for layer in range(sizes.layers)]
        self.taps, self.bias = random(shape.conv_width, 1, shape.taps), random(shape.conv_width)
        self.parameters = (-random(shape.heads).exp(), random(shape.heads) - 2, random(shape.heads))
        joined = random(BLOCK, sequences, shape.conv_width + shape.heads)  # as a projection gives them
        self.x, self.dt = joined.split([shape.conv_width, shape.heads], dim=-1)

    def context(self, position: int, states: StateMemory) -> ForwardContext:
        """Return the layout of one token of each sequence."""
        count = len(self.slots)
        return ForwardContext(
            positions=torch.full((count,), position),
            row_start=np.arange(count, dtype=np.int32),
            lengths=np.ones(count, np.int32),
            starts=np.full(count, position, np.int32),
            table_rows=self.slots,
            block_tables=np.zeros((count, position // BLOCK + 1), np.int32),
            block_size=BLOCK,
            states=states,
        )

    def exact_step(self, position: int, seconds: Seconds) -> torch.Tensor:
        """Run all layers; count the seconds of their scans."""
        context = self.context(position, self.exact)
        token = position % BLOCK
        for options in self.options:
            convolved = causal_conv(self.x[token], self.taps, self.bias, context, options.layer)
            began = time.perf_counter()
            out = scan(convolved, self.dt[token], *self.parameters, context, options)
            seconds.scans += time.perf_counter() - began
        return out

    def recurrent_step(self, position: int, seconds: Seconds) -> torch.Tensor:
        context = self.context(position, self.windows)
        token, slots = position % BLOCK, context.layout[3]
        for options, recurrence in zip(self.options, self.recurrences, strict=True):
            convolved = causal_conv(self.x[token], self.taps, self.bias, context, options.layer)
            began = time.perf_counter()
            out = recurrence.step(convolved, self.dt[token], *self.parameters, slots)
            seconds.scans += time.perf_counter() - began
        return out


def measure(sizes: Sizes) -> dict[str, Spread]:
    """Return the ratios of a whole step and of the scans alone, by number of sequences."""
    metrics: dict[str, Spread] = {}
    for count in sizes.sequences:
        layers = Layers(sizes, count)
        rounds = sizes.rounds * min(10, max(sizes.sequences) // count)
        blocks = [_block(layers, number) for number in range(rounds + 1)][1:]  # the first one warms up
        metrics[f"exact_over_recurrent_{count}"] = spread([exact.whole / peer.whole for exact, peer in blocks])
        metrics[f"exact_over_recurrent_{count}_scan_alone"] = spread([one.scans / peer.scans for one, peer in blocks])
    return metrics


@torch.no_grad()
def _block(layers: Layers, number: int) -> tuple[Seconds, Seconds]:
    """Run the steps of one block of tokens, exact and recurrent in turns; blocks alternate which begins."""
    exact, peer = Seconds(), Seconds()
    sides = [(layers.exact_step, exact), (layers.recurrent_step, peer)]
    for position in range(number * BLOCK, (number + 1) * BLOCK):
        outputs = {step: _timed(step, position, seconds) for step, seconds in sides}
        if position == 0 and not torch.allclose(*outputs.values(), rtol=1e-3, atol=1e-3):
            raise RuntimeError("the two steps compute different things")
        sides.reverse()
    return exact, peer


def _timed(step: Callable[[int, Seconds], torch.Tensor], position: int, seconds: Seconds) -> torch.Tensor:
    began = time.perf_counter()
    out = step(position, seconds)
    seconds.whole += time.perf_counter() - began
    return out
