"""Computes tile products (AMX) in plain code for a run of tests, on a processor that has no such instructions.

``PYTHONPATH=tests/processors NUMBA_CACHE_DIR=<an empty folder> pytest -p emulated_tiles ...``. The code around the
instructions is the library's own: which rows and weights are loaded, from where, and what is filled up with zeros.

Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS: a tile's 32 inputs are added up in
two chains, of the even and of the odd inputs; then the sum of both is added to what there was.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.numeric import fma, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.gemm import amx, amx_tiles, grouped
from samebit.kernels.cpu.gemm.amx_tiles import TILE_INPUTS, TILE_OUTPUTS
from samebit.kernels.layout.grids import LANES


@inlined_part
def _nothing() -> None:
    """Stand for the instructions that take tiles and give them back."""


@kernel_part
def add_tile_products(
    vectors: int, steps: int, panel: Any, panel_at: int, width: int, weights: Any, weights_at: int,
    weights_stride: int, sums: Any, sums_at: int,
) -> None:  # fmt: skip
    """Do as `amx_tiles.add_tile_products` does."""
    halves = panel.view(np.uint16)
    for step in range(steps):
        for output in range(TILE_OUTPUTS):
            weight_at = weights_at + output * weights_stride + step * TILE_INPUTS
            for lane in range(vectors * LANES):
                even = odd = np.float32(0)
                for pair in range(TILE_INPUTS // 2):
                    x_at = 2 * (panel_at + (step * (TILE_INPUTS // 2) + pair) * width + lane)
                    even = fma(widen(weights[weight_at + 2 * pair]), widen(halves[x_at]), even)
                    odd = fma(widen(weights[weight_at + 2 * pair + 1]), widen(halves[x_at + 1]), odd)
                sums[sums_at + output * width + lane] += even + odd


for module in (amx, grouped):
    vars(module).update(configure_tiles=_nothing, release_tiles=_nothing)
amx.add_tile_products = add_tile_products
amx_tiles.available = lambda: True
