"""Prepare the one call of a block of routed experts, behind that of a decoder layer, for the steps of a rollout.

Contract: the bits of `routing.route`, of `routed.routed_experts` and of what computes every row, each by itself, and of
the sum of all of it and the residual. Where a device has no such call, or what is given does not fit it, there is none.
"""

import torch

from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.experts import BlockOptions, BlockWeights
from samebit.kernels.ops.dispatch import whole_calls
from samebit.kernels.ops.layers.fitting import weights_fit


def block_call(x: torch.Tensor, weights: BlockWeights, options: BlockOptions) -> LayerCall | None:
    """Return the call that computes the block behind one whose second result is its input, and adds the first; or None.

    ``x``: like either, ``[..., W]``. The options of router and experts have been checked (`check_options`,
    `check_expert_options`).
    """
    calls = whole_calls(x)
    if calls is None or torch.is_grad_enabled() or x.size(-1) != options.width:
        return None
    of_router = weights.router[0].dtype
    allowed = of_router in (x.dtype, torch.float32)
    fits = allowed and weights_fit(weights, options.shapes, x.dtype, (of_router, of_router, torch.float32))
    return calls.block_call(weights, options, x.dtype) if fits else None
