"""Lay out the state of a head in panels: some columns of all rows, then the next ones.

Invariant: where an element lies says nothing about what is computed with it. A state is read for each token, in one
stream from its first byte to its last: a processor asks memory ahead for that, and takes half as long again for a few
lines of each row in turn. So a panel has as many columns as a key and a query read at once.
"""

from typing import Any

from samebit.kernels.cpu.base.part import inlined_part
from samebit.kernels.cpu.base.vectors import REGISTERS
from samebit.kernels.layout.grids import LANES

PANEL = REGISTERS // 4 * LANES
"""Columns of a panel: two sums of each leave half of the registers to what is added."""

COMING = 256 if REGISTERS < 32 else 0
"""Elements of the next state that are asked for at each of four places of a token's products, when nothing else is read
from memory. With AVX-512 it gained nothing."""


@inlined_part
def place_in_panel(v: int, rows: int, wide: int, panel: int) -> Any:
    """Return where column ``v`` of the first row lies in a state of ``rows`` rows of ``wide`` elements; how far apart
    the rows are there; and how many vectors are left of such a row."""
    first = v // panel * panel
    width = min(panel, wide - first)
    return first * rows + v - first, width, (first + width - v) // LANES
