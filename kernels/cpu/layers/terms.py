"""Add the terms of adapters inside of a kernel that computes several operations in one call.

There is a kernel with what adds them and one without: as a branch each would be compiled for calls that have none. What
adds those of one adapter is a kernel too (`adapter_rows`), called at an address that stands before its numbers.
"""

from array import array
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from samebit.kernels.cpu.base.callee import call_at
from samebit.kernels.cpu.base.memory import read
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.layers.adapter_rows import address_of_kernel, numbers_at
from samebit.kernels.cpu.layers.calls import kernel_at
from samebit.kernels.cpu.layers.products import Kernels
from samebit.kernels.layout.lora.adapters import GroupTerms, PlacedTerms

LAYOUT = "2q"
"""Lays out, in a layer's record, where the `Group` numbers of layers of one input lie, and how many these are."""

NO_TERMS = array("q")
"""Stands for what no adapter adds."""

_SIZE = 2 * 8
_KEY = "groups on the CPU"


class Group(NamedTuple):
    """Holds the addresses of a kernel and of the numbers that it reads; and where the numbers of the rows are that go
    through an adapter, 0 for all rows, and how many these are."""

    kernel: int
    numbers: int
    chosen: int
    rows: int


_GROUP = len(Group._fields)


class LayerKernels(NamedTuple):
    """Holds the kernels of a layer without the terms of adapters, and with them."""

    plain: Kernels
    adapted: Kernels

    def at(self, groups: Iterable[object], dtype: torch.dtype) -> int:
        """Return the address of the kernel for these `terms_of` and elements of this type, on this processor."""
        kernels = self.plain if all(group is NO_TERMS for group in groups) else self.adapted
        return kernel_at(kernels.of(dtype), dtype)


@kernel_part
def add_nothing(threads: int, x: int, rows: int, inputs: int, terms: Any, outs: Any, kind: Any) -> None:
    """Add what no adapter adds."""


@kernel_part
def add_adapter(threads: int, x: int, rows: int, inputs: int, terms: Any, outs: Any, kind: Any) -> None:
    """Add the terms of all adapters to the results ``outs`` of up to three layers."""
    first, count = terms
    for place in range(0, count, _GROUP):
        group = Group(*read(first + 8 * place, _GROUP, np.int64(0)))
        number = group.rows if group.chosen else rows
        call_at(group.kernel, (threads, x, inputs, group.numbers, group.chosen, number, outs, kind))


@inlined_part
def terms_at(address: int, place: int) -> Any:
    """Read what `numbers_of` gives, which lies at the ``place`` behind an address."""
    return read(address + place * _SIZE, 2, np.int64(0))


def numbers_of(groups: "array[int]") -> tuple[int, int]:
    """Return where groups lie, and how many numbers they are, as `LAYOUT` takes them."""
    return groups.buffer_info()


def terms_of(placed: PlacedTerms | None) -> "array[int]":
    """Return the `Group` of each adapter, one behind the other; they stay where they are as long as ``placed``."""
    if placed is None:
        return NO_TERMS
    if _KEY not in placed.worked_out:
        groups = (_group_of(group, placed.dtype) for group in placed.groups)
        placed.worked_out[_KEY] = array("q", chain.from_iterable(groups))
    found: array[int] = placed.worked_out[_KEY]
    return found


def _group_of(group: GroupTerms, dtype: torch.dtype) -> Group:
    places, terms, rows = group
    chosen, count = (0, 0) if rows is None else (rows.data_ptr(), len(rows))
    return Group(address_of_kernel(terms.dtype, dtype), numbers_at(places, terms), chosen, count)
