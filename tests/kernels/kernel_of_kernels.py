"""A kernel that calls another one, also by way of a part; ``python kernel_of_kernels.py`` runs it.

It writes what the kernels compute, and how often each was compiled.
"""

import json
import sys
from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel, compile_kernel
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


def compiled() -> list[int]:
    """Return how often the kernel that calls was compiled, and the one that is called."""
    return [sum(kernel.stats.cache_misses.values()) for kernel in (use, add._compiled)]  # type: ignore[attr-defined]


if __name__ == "__main__":
    given = np.zeros(3, np.int64)
    use(given, 5)
    sys.stdout.write(json.dumps([given.tolist(), compiled()]))
