"""Compute decoder layers, each prepared as a call, one after the other in one call, for the steps of a rollout.

Contract: the bits of the layers' calls, each made by itself.
"""

from collections.abc import Sequence

import torch

from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.ops import dispatch
from samebit.kernels.ops.rope import RotaryTables


def run_layers(
    x: torch.Tensor, calls: Sequence[LayerCall], tables: Sequence[RotaryTables]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what the layers make of ``x``, for which their calls were prepared; where behind that of the last one
    another MLP follows, also that one's input. ``tables``: of each, all of one context."""
    angles = {id(one): (one.cos, one.sin) for one in tables}
    return dispatch.run_layers(x, calls, [angles[id(one)] for one in tables], tables[0].context)
