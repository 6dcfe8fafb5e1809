"""Find out what the norms of a decoder layer, or behind all of them, compute, where that is in one call."""

from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.attached import Attachments
from samebit.kernels.binding.layers.linears import facts_of_part
from samebit.kernels.binding.layers.untouched import runs
from samebit.kernels.binding.modules import NormFacts, layer_norm_forward, rms_norm_forward


def numbers_of(parent: nn.Module, name: str, parts: Attachments, *, biased: bool = False) -> tuple[float, float] | None:
    """Return eps and offset of an RMSNorm, of a LayerNorm too where it may be ``biased``, zeros without a name; None
    where it is another kind of module."""
    if not name:
        return 0.0, 0.0
    norm = parent.get_submodule(name)
    if biased and type(norm) is nn.LayerNorm:
        return norm.eps, 0.0
    facts = facts_of_part(norm, parts)
    return (facts.eps, facts.offset) if isinstance(facts, NormFacts) else None


def computes_norm(norm: Any) -> bool:
    """Return whether a call of a norm of either kind is the forward that `bind` gave it, and no hook listens."""
    return runs(norm, layer_norm_forward if type(norm) is nn.LayerNorm else rms_norm_forward)


def bias_of(norm: Any) -> torch.Tensor | None:
    """Return the bias of a LayerNorm; None of an RMSNorm, and where there is no norm."""
    return norm.bias if type(norm) is nn.LayerNorm else None
