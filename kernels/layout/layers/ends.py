"""Hold the parameters of what stands before and behind the decoder layers of a step that is one call.

V tokens of the embedding, W hidden size, N outputs of the head.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from samebit.kernels.layout.layers.weights import LayerWeights
from samebit.kernels.layout.options import Layer


class EndNumbers(NamedTuple):
    """Holds the factor on embeddings, as their dtype has it or a number of Python's, eps of the last norm, and what is
    added to its weight."""

    factor: float
    eps: float
    offset: float


@dataclass(frozen=True, eq=False)
class EndWeights(LayerWeights):
    """Holds the parameters of the embedding, of the last norm, whose bias an RMSNorm does not have, and of the head."""

    embedding: torch.Tensor
    norm: torch.Tensor
    norm_bias: torch.Tensor | None
    head: Layer

    @cached_property
    def flat(self) -> tuple[torch.Tensor | None, ...]:
        """Return the parameters one by one; None for a bias that is not there."""
        return self.embedding, self.norm, self.norm_bias, *self.head

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that these have where they fit each other."""
        (tokens, width), outputs = self.embedding.shape, len(self.head[0])
        return (tokens, width), (width,), (width,), (outputs, width), (outputs,)
