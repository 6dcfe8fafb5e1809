"""Compare the rollout's experts with the trainer's, token by token.

verl carries the experts that a server reports (`rollout.custom.routed_experts`) in the field `routed_experts`
`[tokens, layers, experts of a token]`, with zeros where a server computed nothing: behind the last sampled token but
one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebit.kernels.binding.experts.routes import RouteLayout, Routes

COMPARED, DIFFERING = "routing_compared", "routing_differing"
"""Fields of the trainer's output: pairs of a token and an expert, counted for each token."""


def compared_routes(reported: Tensor, input_ids: Any, noted: Routes, layout: RouteLayout) -> dict[str, Tensor]:
    """Count for each token the pairs that were compared, and those of the rollout's that the trainer lacks.

    Args:
        reported: nested ``[B, tokens, layers, top_k]``, the rollout's.
        input_ids: nested ``[B, tokens]``.
        noted: ``[rows, layers, top_k]``, the trainer's; the rows are the tokens one behind the other, or ``[B, T]``
            padded on the right.
    """
    lengths = input_ids.offsets().diff().tolist()
    layers = list(layout.layers)
    theirs = reported.values().cpu().numpy()[:, layers]
    own = _without_padding(noted, lengths)[:, layers]
    known = theirs.any(axis=(1, 2)) if layout.top_k > 1 else np.ones(len(theirs), bool)
    lacking = (theirs[..., None] != own[..., None, :]).all(-1).sum(axis=(1, 2)) * known
    counts = {COMPARED: known * theirs[0].size, DIFFERING: lacking}
    return {
        name: torch.nested.nested_tensor_from_jagged(torch.from_numpy(count.astype(np.int32)), input_ids.offsets())
        for name, count in counts.items()
    }


def _without_padding(noted: Routes, lengths: list[int]) -> Routes:
    """Return the rows of tokens: all but those behind the last, or behind each sequence of a rectangle."""
    width = max(lengths)
    if len(noted) != len(lengths) * width:
        return noted[: sum(lengths)]
    rectangle = noted.reshape(len(lengths), width, *noted.shape[1:])
    return np.concatenate([row[:length] for row, length in zip(rectangle, lengths, strict=True)])
