"""Add the terms of an adapter inside of a kernel that computes several operations in one call.

There is a kernel with what adds them and one without: as a branch each would be compiled for calls that have none.
"""

from collections.abc import Iterable
from struct import calcsize
from typing import Any, NamedTuple

import numpy as np
import torch

from samebit.kernels.cpu.base.memory import read
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.gemm.layers import MOST_LAYERS
from samebit.kernels.cpu.layers.calls import kernel_at
from samebit.kernels.cpu.layers.products import Kernels, shared
from samebit.kernels.cpu.low_rank import PRODUCTS, Matrices, add_terms
from samebit.kernels.layout.lora.adapters import PlacedTerms

_add_terms = add_terms.part

NO_TERMS = ((0,) * 12, 0, (0.0,) * MOST_LAYERS, (0,) * MOST_LAYERS, 0)
"""Stands for what an adapter does not add: `Terms` as a kernel takes them."""


LAYOUT = "12q q 3d 3q q"
"""Lays out `Terms` among the numbers of a layer (`calls.record`)."""

_SIZE = calcsize(LAYOUT)


class Terms(NamedTuple):
    """Holds what an adapter adds to layers that share an input: `low_rank.Matrices`, the places of their layers, and
    products a row; without products nothing is added."""

    layers: Any
    panel: int
    scales: Any
    places: Any
    work: int


class LayerKernels(NamedTuple):
    """Holds the kernels of a layer without the terms of an adapter, and with them."""

    plain: Kernels
    adapted: Kernels

    def at(self, groups: Iterable[object], dtype: torch.dtype) -> int:
        """Return the address of the kernel for these `Terms` and elements of this type, on this processor."""
        kernels = self.plain if all(group is NO_TERMS for group in groups) else self.adapted
        return kernel_at(kernels.of(dtype), dtype)


@kernel_part
def add_nothing(threads: int, x: int, rows: int, inputs: int, terms: Any, outs: Any, kind: Any) -> None:
    """Add what no adapter adds."""


@kernel_part
def add_adapter(threads: int, x: int, rows: int, inputs: int, terms: Any, outs: Any, kind: Any) -> None:
    """Add the terms of an adapter to the results ``outs`` of up to three layers."""
    group = Terms(*terms)
    if group.work > 0:
        first, second, third = group.places
        _add_terms(
            shared(rows * group.work // PRODUCTS, threads), x, inputs, rows, inputs, group.layers, group.panel,
            group.scales, (outs[first], outs[second], outs[third]), kind,
        )  # fmt: skip


@inlined_part
def terms_at(address: int, place: int) -> Any:
    """Read the `Terms` that lie at the ``place`` behind an address."""
    no, first = np.int64(0), address + place * _SIZE
    layers, scales, rest = read(first, 13, no), read(first + 13 * 8, 3, np.float64(0)), read(first + 16 * 8, 4, no)
    return layers[:12], layers[12], scales, rest[:3], rest[3]


def numbers_of(group: tuple[Any, ...]) -> tuple[float, ...]:
    """Return `Terms` one number after the other, as `LAYOUT` takes them."""
    layers, panel, scales, places, work = group
    return (*layers, panel, *scales, *places, work)


def terms_of(placed: PlacedTerms | None) -> tuple[Any, ...]:
    """Return `Terms` as a kernel takes them; ``placed`` has float32 matrices."""
    if placed is None:
        return NO_TERMS
    places, terms = placed
    matrices = Matrices.of(terms)
    if matrices is None:
        raise TypeError("an adapter's matrices are not float32; allowed in a layer's one call: torch.float32")
    padded = (*places, *(0,) * (MOST_LAYERS - len(places)))
    return matrices.layers, matrices.panel, matrices.scales, padded, matrices.work
