"""Write latents into their pages on the CPU. `samebit.kernels.layout.kv_pages` defines the layout."""

from typing import Any

from numba import prange

from samebit.kernels.cpu.base.jit import RowKernel


def _write(latents: Any, block_of_row: Any, offset_of_row: Any, pages: Any) -> None:
    """Write ``[T, W]`` rows to ``pages[block, offset]``."""
    for row in prange(latents.shape[0]):
        target = pages[block_of_row[row], offset_of_row[row]]
        for d in range(latents.shape[1]):
            target[d] = latents[row, d]


write_pages = RowKernel(_write)
