"""Lay rows of bfloat16 out in pairs of inputs, as instructions take them that multiply two inputs at once."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.vectors import VECTOR, pointer_to
from samebit.kernels.cpu.gemm.many_rows_vectors import HALF, places_of, store_columns
from samebit.kernels.layout.grids import LANES

STEP = 2 * LANES
"""Inputs that are paired at a time; a panel of pairs has a whole number of steps."""


@kernel_part
def pair_rows(x: Any, stride: int, inputs: int, rows_of_panel: Any) -> None:
    """Write each row's inputs in pairs; the last row stands for those beyond it, inputs beyond the last are 0."""
    panel, width, first, rows = rows_of_panel
    at = first * stride
    whole = inputs // STEP * STEP
    halves = panel.view(np.uint16)
    for k in range(0, whole, STEP):  # all rows of a few inputs: lines of the panel are written whole
        for row in range(0, width, HALF):
            strip, there = at + min(row, rows - 1) * stride, max(1, min(HALF, rows - row))
            transpose_pairs(x, strip + k, stride, there, panel, k // 2 * width + row, width)
    for pair in range(whole // 2, len(panel) // width):
        for row in range(width):
            for k in range(2 * pair, 2 * pair + 2):
                value = x[at + min(row, rows - 1) * stride + k] if k < inputs else np.uint16(0)
                halves[2 * (pair * width + row) + k - 2 * pair] = value


@intrinsic
def transpose_pairs(
    typingctx: Any, source: Any, source_at: Any, source_stride: Any, there: Any, target: Any, target_at: Any,
    target_stride: Any,
) -> Any:  # fmt: skip
    """Write ``target[p, i] = source[i, 2 p : 2 p + 2]`` of eight rows and sixteen pairs, as bits in float32.

    Of the rows ``there`` are there (1 to 8): the last stands for those beyond.
    """
    i64 = types.int64
    signature = types.void(source, i64, i64, i64, target, i64, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from_array, first, step, rows, to_array, target_first, target_step = args
        loaded = []
        for place in places_of(builder, first, step, rows):
            row = pointer_to(context, builder, source, from_array, place)
            loaded.append(builder.load(builder.bitcast(row, VECTOR.as_pointer()), align=2))
        store_columns(builder, loaded, pointer_to(context, builder, target, to_array, target_first), target_step)
        return context.get_dummy_value()

    return signature, generate
