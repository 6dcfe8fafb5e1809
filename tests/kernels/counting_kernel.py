"""Define a kernel that says which of its items were computed."""

from typing import Any

from numba import njit

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.share_out import share_out


@njit(nogil=True, error_model="numpy")
def _count(item: int, scale: float, counts: Any, refused: int) -> None:
    if item == refused:
        raise ValueError("an item that fails")
    counts[item] += scale * (item + 1)


def _kernel(threads: int, items: int, scale: float, counts: Any, refused: int) -> None:
    share_out(_count, items, threads, (scale, counts, refused))


kernel = compile_kernel(_kernel)
