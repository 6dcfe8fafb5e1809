"""Say what tells the latent attention of one family from that of another."""

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

_ROTATES_NEIGHBOURS, _ROTATES_HALVES = "apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb"
"""Modules of transformers whose attention rotates neighbours have a function of the first name, and those whose
attention or indexer rotates halves one of the second."""


@dataclass(frozen=True)
class IndexerFamily:
    """Describes one family's indexers, which choose the tokens that attention reads.

    Attributes:
        halves: its rotated elements stand in halves, whatever those of attention do; otherwise versions differ.
        shares: a layer may have none of its own and take the choice of the layer before; attention then returns what
            was chosen, behind its weights.
    """

    halves: bool
    shares: bool


@dataclass(frozen=True)
class LatentFamily:
    """Describes one family's attention over latents.

    Attributes:
        interleaved: the config's key for whether the two elements that are rotated together stand side by side; empty
            where no key says it.
        by_version: versions of transformers differ in that; without a key and this they always do.
        indexer: of its sparse attention; None where every token is read.
        rotated: False where the part of a key that all heads share is not rotated: attention knows no positions.
    """

    interleaved: str = ""
    by_version: bool = False
    indexer: IndexerFamily | None = None
    rotated: bool = True

    expansion = "kv_b_proj"
    """Names the projection of a latent to each head's key and value."""

    def is_interleaved(self, module: nn.Module, config: dict[str, Any]) -> bool:
        """Return whether the class of an attention module rotates elements that stand side by side."""
        if self.by_version:
            return _ROTATES_NEIGHBOURS in vars(sys.modules[type(module).__module__])
        return not self.interleaved or bool(config[self.interleaved])

    def index_in_halves(self, module: nn.Module) -> bool:
        """Return whether the class of an attention module's indexer rotates elements that stand in halves."""
        known = self.indexer is not None and self.indexer.halves
        return known or _ROTATES_HALVES in vars(sys.modules[type(module).__module__])
