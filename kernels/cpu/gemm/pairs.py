"""Rows of bfloat16 in pairs of inputs, 32 bits each, as instructions take them that multiply two inputs at once."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.vectors import VECTOR, row_of, transposed
from samebit.kernels.layout.grids import LANES

STEP = 2 * LANES
"""Inputs that are paired at a time; a panel of pairs has a whole number of steps."""


@kernel_part
def pair_rows(x: Any, stride: int, inputs: int, rows_of_panel: Any) -> None:
    """Write each row's inputs in pairs; rows beyond the last and inputs beyond the last are 0."""
    panel, width, first, rows = rows_of_panel
    at = first * stride
    whole = inputs // STEP * STEP
    halves = panel.view(np.uint16)
    for row in range(0, width, LANES):
        filled = row + LANES <= rows
        if filled:
            for k in range(0, whole, STEP):
                transpose_pairs(x, at + row * stride + k, stride, panel, k // 2 * width + row, width)
        for pair in range(whole // 2 if filled else 0, len(panel) // width):
            for lane in range(row, row + LANES):
                for k in range(2 * pair, 2 * pair + 2):
                    there = lane < rows and k < inputs
                    value = x[at + lane * stride + k] if there else np.uint16(0)
                    halves[2 * (pair * width + lane) + k - 2 * pair] = value


@intrinsic
def transpose_pairs(
    typingctx: Any, source: Any, source_at: Any, source_stride: Any, target: Any, target_at: Any, target_stride: Any
) -> Any:
    """Write ``target[p, i] = source[i, 2 p : 2 p + 2]`` of sixteen rows and pairs, as bits in float32."""
    i64 = types.int64
    signature = types.void(source, i64, i64, target, i64, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from_array, first, step, to_array, target_first, target_step = args

        def bits_of(array_type: Any, array: Any, base: Any, stride: Any, row: int) -> Any:
            return builder.bitcast(row_of(context, builder, array_type, array, base, stride, row), VECTOR.as_pointer())

        rows = [builder.load(bits_of(source, from_array, first, step, i), align=2) for i in range(LANES)]
        for i, row in enumerate(transposed(builder, rows)):
            builder.store(row, bits_of(target, to_array, target_first, target_step, i), align=4)
        return context.get_dummy_value()

    return signature, generate
