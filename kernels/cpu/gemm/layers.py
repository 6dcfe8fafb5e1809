"""Describe layers of one input as the matrix products of this folder take them, and the share of one that a work item
computes.

They travel as one tuple of integers: that is what Numba carries into a parallel loop, and it costs a call less than a
named tuple does. T rows, K inputs, N outputs.
"""

from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.base.memory import elements
from samebit.kernels.cpu.base.part import inlined_part

MOST_LAYERS = 3

_FIELDS = 4

Layers = tuple[int, ...]
"""Holds four numbers a layer (addresses of weight and bias, 0 for no bias; outputs; address of the result), then
zeros, up to `MOST_LAYERS` layers."""

NO_LAYER = (np.int64(0),) * _FIELDS  # of Python's 0, Numba takes the value for a part of the type
"""Stands for a layer that is not there."""

NO_OTHERS = NO_LAYER * (MOST_LAYERS - 1)
"""Stands behind the only layer of a product."""


def in_one(addresses: list[int]) -> Layers:
    """Fill the addresses and numbers of one to three layers up with layers of no outputs."""
    return (*addresses, *(0,) * (MOST_LAYERS * _FIELDS - len(addresses)))


class Share(NamedTuple):
    """Names the outputs ``first`` to ``last`` of a layer.

    weight: ``[N, K]``. bias: ``[N]``, or empty. out: ``[T, N]``, N being ``outputs``; all flat.
    """

    weight: Any
    bias: Any
    out: Any
    outputs: int
    first: int
    last: int


@inlined_part
def most_outputs(layers: Any) -> int:
    """Return the outputs of the layer that has the most."""
    most = 0
    for place in range(MOST_LAYERS):
        most = max(most, layers[place * _FIELDS + 2])
    return most


@inlined_part
def shares(panels: int, outputs: int, tile: int, threads: int) -> int:
    """Return how many parts the outputs are shared out into, so that few panels keep all threads at work."""
    return 1 if panels >= 8 * threads else min(threads, (outputs + 4 * tile - 1) // (4 * tile))


@inlined_part
def share_of(layers: Any, place: int, part: int, parts: int, tile: int, rows: int, inputs: int, kind: Any) -> Any:
    """Return the share of one of ``parts`` in the layer at this place, whole tiles of outputs but for the last."""
    weight, bias, outputs, out = (
        layers[place * _FIELDS],
        layers[place * _FIELDS + 1],
        layers[place * _FIELDS + 2],
        layers[place * _FIELDS + 3],
    )
    size = (outputs + parts * tile - 1) // (parts * tile) * tile
    first = min(part * size, outputs)
    return Share(
        elements(weight, outputs * inputs, kind), elements(bias, outputs if bias else 0, kind),
        elements(out, rows * outputs, kind), outputs, first, min(first + size, outputs),
    )  # fmt: skip
