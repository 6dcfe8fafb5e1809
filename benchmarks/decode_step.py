"""The exact decode step of a Mamba layer beside the plain recurrent one, both from the projection's output on.

A turn is one whole block of tokens, so every position of the chunk's tail counts once, and so does each move of the
state and the copy of it at the block's end.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from alternate import Calibration, Round, Spread, Turn, alternate, kept, ratio
from recurrent import Recurrence

from samebit.kernels.context import ForwardContext
from samebit.kernels.conv import causal_conv
from samebit.kernels.ssd import scan
from samebit.kernels.states import SSMOptions, SSMShape, StateLayout, StateMemory

BLOCK = 64


@dataclass(frozen=True)
class Sizes:
    """How much is computed: layers in turn, so that no state stays in a cache that it would not stay in.

    rounds: of the most sequences; a turn of fewer is shorter, and there are up to ten times as many of them.
    """

    shape: SSMShape
    layers: int = 4
    sequences: tuple[int, ...] = (1, 16, 64)
    rounds: int = 7


class Layers:
    """Some Mamba layers with random inputs and parameters, and two memories: of the exact step and of its peer."""

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
        """The layout of one token of each sequence."""
        count = len(self.slots)
        return ForwardContext(
            positions=torch.full((count,), position),
            row_start=np.arange(count, dtype=np.int32),
            lengths=np.ones(count, np.int32),
            starts=np.full(count, position, np.int32),
            table_rows=self.slots,
            block_tables=np.zeros((1, 1), np.int32),
            block_size=BLOCK,
            states=states,
        )

    def exact_step(self, position: int, seconds: list[float]) -> torch.Tensor:
        """All layers; the seconds of their scans alone are added to the first entry."""
        context = self.context(position, self.exact)
        token = position % BLOCK
        for options in self.options:
            convolved = causal_conv(self.x[token], self.taps, self.bias, context, options)
            began = time.perf_counter()
            out = scan(convolved, self.dt[token], *self.parameters, context, options)
            seconds[0] += time.perf_counter() - began
        return out

    def recurrent_step(self, position: int, seconds: list[float]) -> torch.Tensor:
        context = self.context(position, self.windows)
        token, slots = position % BLOCK, context.layout[3]
        for options, recurrence in zip(self.options, self.recurrences, strict=True):
            convolved = causal_conv(self.x[token], self.taps, self.bias, context, options)
            began = time.perf_counter()
            out = recurrence.step(convolved, self.dt[token], *self.parameters, slots)
            seconds[0] += time.perf_counter() - began
        return out


def measure(sizes: Sizes, calibration: Calibration) -> dict[str, Spread]:
    """The ratio of a whole step, and that of the scans alone, by number of sequences."""
    metrics: dict[str, Spread] = {}
    for count in sizes.sequences:
        rounds = sizes.rounds * min(10, max(sizes.sequences) // count)
        whole, alone = _rounds(Layers(sizes, count), rounds, calibration)
        metrics[f"exact_over_recurrent_{count}"] = ratio(whole, "exact", "recurrent")
        metrics[f"exact_over_recurrent_{count}_scan_alone"] = ratio(alone, "exact", "recurrent")
    return metrics


@torch.no_grad()
def _rounds(layers: Layers, rounds: int, calibration: Calibration) -> tuple[list[Round], list[Round]]:
    steps = {"exact": layers.exact_step, "recurrent": layers.recurrent_step}
    outputs = {name: step(0, [0.0]) for name, step in steps.items()}
    if not torch.allclose(outputs["exact"], outputs["recurrent"], rtol=1e-3, atol=1e-3):
        raise RuntimeError("the two steps compute different things")
    scans: dict[str, dict[int, float]] = {name: {} for name in steps}

    def turn(name: str) -> Turn:
        def once(number: int) -> float:
            seconds = [0.0]
            began = time.perf_counter()
            for position in range(number * BLOCK, (number + 1) * BLOCK):
                steps[name](position, seconds)
            scans[name][number] = seconds[0]
            return time.perf_counter() - began

        return once

    steady = kept(alternate({name: turn(name) for name in steps}, rounds, calibration), calibration)
    alone = [Round(one.number, {name: scans[name][one.number] for name in steps}) for one in steady]
    return steady, alone
