"""Define a kernel that calls another one, also by way of a part; ``python kernel_of_kernels.py`` runs it.

It writes what the kernels compute, and how often each was compiled.
"""

import json
import sys
from typing import Any

import numpy as np

from samebit.kernels.cpu.base.callee import call_at
from samebit.kernels.cpu.base.jit import SharedKernel, compile_kernel
from samebit.kernels.cpu.base.memory import doubles, read
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.share_out import share_out


@kernel_part
def _add_item(item: int, values: Any, amount: Any) -> None:
    values[item] += amount


def _add(threads: int, values: Any, amount: Any) -> None:
    if len(values) == 0:
        raise ValueError("no values")
    share_out(_add_item, len(values), threads, (values, amount))


add = SharedKernel(_add)
_added = add.part


@kernel_part
def _add_twice(values: Any, amount: Any) -> None:
    _added(1, values, amount)
    _added(1, values[1:], amount)


def _use(values: Any, amount: Any) -> None:
    _add_twice(values, amount)
    _added(1, values, 1)


use = compile_kernel(_use)


def _add_read(amount: int, numbers: int, out: int) -> None:
    """Add what is read at an address."""
    if amount < 0:
        raise ValueError("below 0")
    first, second = read(numbers, 2, np.int64(0))
    (half,) = read(numbers + 16, 1, np.float32(0))
    doubles(out, 1)[0] += amount * (first + second + half)


add_read = compile_kernel(_add_read)


def _add_reads(address: int, amounts: Any, numbers: int, out: int) -> None:
    for amount in amounts:
        call_at(address, (amount, numbers, out))


add_reads = compile_kernel(_add_reads)


def compiled() -> list[int]:
    """Return how often the kernel that calls was compiled, and the one that is called."""
    return [sum(kernel.stats.cache_misses.values()) for kernel in (use, add._compiled)]  # type: ignore[attr-defined]


if __name__ == "__main__":
    given = np.zeros(3, np.int64)
    use(given, 5)
    sys.stdout.write(json.dumps([given.tolist(), compiled()]))
