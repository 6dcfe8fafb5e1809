"""Write latents into their pages on the CPU. `samebit.kernels.layout.kv_pages` defines the layout.

T tokens, W elements of a latent and its rotated key.
"""

from typing import Any

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.share_out import share_out


def _write(threads: int, latents: Any, block_of_row: Any, offset_of_row: Any, pages: Any) -> None:
    """Write ``[T, W]`` rows to ``pages[block, offset]``."""
    share_out(_write_row, latents.shape[0], threads, (latents, block_of_row, offset_of_row, pages))


@kernel_part
def _write_row(row: int, latents: Any, block_of_row: Any, offset_of_row: Any, pages: Any) -> None:
    target = pages[block_of_row[row], offset_of_row[row]]
    for d in range(latents.shape[1]):
        target[d] = latents[row, d]


write_pages = SharedKernel(_write)
