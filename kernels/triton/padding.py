"""Clear rows that belong to no sequence, in a launch that runs anyway: a CUDA graph of a step has room for more rows.

Such rows go on through norms and products, which are computed a row at a time. So they change no other row, but they
have to be numbers: what memory happens to hold may be NaN or infinite, and a router, say, has to choose something.
"""

import triton.language as tl
from triton.language import tensor

from samebit.kernels.triton.numeric import jit

_SIZE = tl.constexpr(1024)


@jit()
def clear_if_idle(out: tensor, sequences: tensor, row: tensor, WIDTH: tl.constexpr) -> None:
    """Write zeros to a row ``[WIDTH]`` of ``out`` if it is of no sequence."""
    if tl.load(sequences + row) < 0:
        for first in range(0, WIDTH, _SIZE):
            place = first + tl.arange(0, _SIZE)
            tl.store(out + row * WIDTH + place, tl.zeros((_SIZE,), out.dtype.element_ty), mask=place < WIDTH)


@jit()
def clear_idle_parts(
    out: tensor, sequences: tensor, rows: tensor, part: tensor, parts: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Write zeros to one of the parts ``[WIDTH]`` of each row of no sequence: programs along axis 0 take turns."""
    place = tl.arange(0, PADDED)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        if tl.load(sequences + row) < 0:
            at = (tl.cast(row, tl.int64) * parts + part) * WIDTH + place
            tl.store(out + at, tl.zeros((PADDED,), out.dtype.element_ty), mask=place < WIDTH)
