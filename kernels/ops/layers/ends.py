"""Prepare what stands before and behind the decoder layers of a rollout's step as calls of their own kind, so that a
step is one call from token ids to logits.

Contract: the bits of the modules, each called by itself: the embedding's rows, times a factor; of the rows that reach
the head their norm, its product with the head rounded to its dtype, and that as float32. Where a device has no such
calls, or what is given does not fit them, there are none, and the modules are to be called.
"""

from typing import NamedTuple

import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.ends import EndNumbers, EndWeights
from samebit.kernels.ops.dispatch import whole_calls
from samebit.kernels.ops.layers.fitting import weights_fit


class Ends(NamedTuple):
    """Holds the call before the layers and the one behind them.

    Attributes:
        x: like hidden states, of which it has no values: what the layers' calls are prepared for.
        logits: ``[K, N]`` float32, where the second call puts them.
    """

    x: torch.Tensor
    first: LayerCall
    last: LayerCall
    logits: torch.Tensor


def end_calls(
    ids: torch.Tensor, kept: torch.Tensor | None, weights: EndWeights, numbers: EndNumbers,
    context: ForwardContext,
) -> Ends | None:  # fmt: skip
    """Return the calls for a step; or None.

    They read ids and rows where these lie now. As the modules do, they raise IndexError for one out of range.

    Args:
        ids: ``[1, T]``, of the T rows of the context.
        kept: ``[K]``, the rows that reach the head, None for all.
        weights: of the modules.
        numbers: of these.
        context: whose calls run without gradients.
    """
    embedding = weights.embedding
    fits = (
        _places_fit(ids, 2)
        and ids.shape == (1, context.num_rows)
        and (kept is None or _places_fit(kept, 1))
        and embedding.dim() == 2
        and weights_fit(weights, weights.shapes, embedding.dtype)
    )
    calls = whole_calls(embedding) if fits else None
    if calls is None:
        return None
    x = torch.empty(*ids.shape, embedding.size(1), dtype=embedding.dtype, device="cpu")
    rows = context.num_rows if kept is None else len(kept)
    logits = torch.empty(rows, len(weights.head[0]), dtype=torch.float32, device="cpu")
    return Ends(x, *calls.end_calls(ids, kept, weights, numbers, logits), logits)


def _places_fit(places: torch.Tensor, dimensions: int) -> bool:
    return places.is_cpu and places.dtype is torch.int64 and places.dim() == dimensions and places.is_contiguous()
