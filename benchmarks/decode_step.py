"""Measure the exact decode step of a layer with a state beside the plain recurrent one, both from the projection's
output on.

They take turns step by step, so that what slows the machine slows both. A round is one whole block of tokens: every
position of the chunk's tail counts once, and so does each move of the state and the copy of it at the block's end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from samebit.benchmarks.contestants.recurrent_cpu import Recurrence
from samebit.benchmarks.contestants.recurrent_delta_cpu import DeltaRecurrence
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.options import DeltaOptions, SSMOptions
from samebit.kernels.layout.states.delta import DeltaShape
from samebit.kernels.layout.states.mamba import SSMShape
from samebit.kernels.layout.states.memory import StateLayout, StateMemory
from samebit.kernels.ops.conv import causal_conv
from samebit.kernels.ops.delta.gates import gates
from samebit.kernels.ops.delta.rule import delta_rule
from samebit.kernels.ops.ssd import scan

BLOCK = 64


@dataclass(frozen=True)
class Sizes:
    """Sets the size of the measurement: several layers in turn, so that no state stays in the processor's cache.

    rounds: with the most sequences; with fewer there are up to ten times as many, which are shorter.
    """

    shape: SSMShape | DeltaShape
    layers: int = 4
    sequences: tuple[int, ...] = (1, 16, 64)
    rounds: int = 7


@dataclass
class Seconds:
    """Holds the seconds of one side's steps in a round: whole steps, and what they do behind the convolution."""

    whole: float = 0.0
    scans: float = 0.0


class Kind(Protocol):
    """Computes what a kind of layer does behind the convolution, exactly and by its recurrence.

    ``token``: of the block, one of each sequence; it has its own inputs.
    """

    def exact(self, convolved: torch.Tensor, token: int, layer: int, context: ForwardContext) -> torch.Tensor: ...

    def recurrent(self, convolved: torch.Tensor, token: int, layer: int, slots: torch.Tensor) -> torch.Tensor: ...


class Mamba:
    """Computes layers of Mamba2 with random time steps and parameters."""

    def __init__(self, shape: SSMShape, layers: int, sequences: int) -> None:
        self.recurrences = [Recurrence.empty(shape, sequences) for _ in range(layers)]
        self.options = [SSMOptions(layer, BLOCK, shape.groups, shape.state_size) for layer in range(layers)]
        heads, generator = shape.heads, torch.Generator().manual_seed(1)
        rate, bias, skip = torch.randn(3, heads, generator=generator)
        self.parameters = (-rate.exp(), bias - 2, skip)
        self.dt = torch.randn(BLOCK, sequences, heads, generator=generator)

    def exact(self, convolved: torch.Tensor, token: int, layer: int, context: ForwardContext) -> torch.Tensor:
        return scan(convolved, self.dt[token], *self.parameters, context, self.options[layer])

    def recurrent(self, convolved: torch.Tensor, token: int, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return self.recurrences[layer].step(convolved, self.dt[token], *self.parameters, slots)


class Delta:
    """Computes layers of Gated DeltaNet with random gates and parameters; the gates are the same code on both sides."""

    def __init__(self, shape: DeltaShape, layers: int, sequences: int) -> None:
        self.recurrences = [DeltaRecurrence.empty(shape, sequences) for _ in range(layers)]
        sizes = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim
        self.options = [DeltaOptions(layer, BLOCK, *sizes, shape.by_channel) for layer in range(layers)]
        generator = torch.Generator().manual_seed(1)
        heads, decays = shape.value_heads, self.options[0].decays
        self.a, self.b = (torch.randn(BLOCK, sequences, width, generator=generator) for width in (decays, heads))
        self.parameters = tuple(torch.randn(width, generator=generator) for width in (heads, decays))

    def exact(self, convolved: torch.Tensor, token: int, layer: int, context: ForwardContext) -> torch.Tensor:
        return delta_rule(convolved, *self._gates(token), context, self.options[layer])

    def recurrent(self, convolved: torch.Tensor, token: int, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return self.recurrences[layer].step(convolved, *self._gates(token), slots)

    def _gates(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        return gates(self.a[token], self.b[token], *self.parameters)


class Layers:
    """Holds some layers with random inputs, and two memories: of the exact step and of its peer."""

    def __init__(self, sizes: Sizes, sequences: int) -> None:
        shape = sizes.shape
        layout = StateLayout(sizes.layers, shape, BLOCK)
        generator = torch.Generator().manual_seed(0)
        self.slots = np.arange(sequences, dtype=np.int32)
        self.layers = range(sizes.layers)
        self.exact, self.windows = (layout.allocate(sequences, torch.float32) for _ in range(2))
        made = Mamba(shape, sizes.layers, sequences) if isinstance(shape, SSMShape) else None
        self.kind: Kind = made or Delta(shape, sizes.layers, sequences)
        self.taps = torch.randn(shape.conv_width, 1, shape.taps, generator=generator)
        self.bias = torch.randn(shape.conv_width, generator=generator)
        joined = torch.randn(BLOCK, sequences, shape.conv_width + 32, generator=generator)
        self.x = joined[..., : shape.conv_width]  # a part of more, as a projection gives it

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
        """Run all layers; count the seconds of what comes behind their convolutions."""
        context = self.context(position, self.exact)
        token = position % BLOCK
        for layer in self.layers:
            convolved = causal_conv(self.x[token], self.taps, self.bias, context, layer)
            began = time.perf_counter()
            out = self.kind.exact(convolved, token, layer, context)
            seconds.scans += time.perf_counter() - began
        return out

    def recurrent_step(self, position: int, seconds: Seconds) -> torch.Tensor:
        context = self.context(position, self.windows)
        token, slots = position % BLOCK, context.layout[3]
        for layer in self.layers:
            convolved = causal_conv(self.x[token], self.taps, self.bias, context, layer)
            began = time.perf_counter()
            out = self.kind.recurrent(convolved, token, layer, slots)
            seconds.scans += time.perf_counter() - began
        return out


def measure(sizes: Sizes, name: str) -> dict[str, Spread]:
    """Return ``name`` of a whole step, and of what comes behind the convolutions alone, by number of sequences."""
    metrics: dict[str, Spread] = {}
    for count in sizes.sequences:
        layers = Layers(sizes, count)
        rounds = sizes.rounds * min(10, max(sizes.sequences) // count)
        blocks = [_block(layers, number) for number in range(rounds + 1)][1:]  # the first one warms up
        metrics[f"{name}_{count}"] = spread([exact.whole / peer.whole for exact, peer in blocks])
        metrics[f"{name}_{count}_scan_alone"] = spread([one.scans / peer.scans for one, peer in blocks])
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
