"""Name what operations hand to a device, constants of a layer that `bind` found, and the types of what comes back."""

from dataclasses import dataclass

import torch

Saved = tuple[torch.Tensor, ...]
"""The tensors that a forward hands to its backward. Only the device that wrote it reads it."""

Layer = tuple[torch.Tensor, torch.Tensor | None]
"""Weight ``[N, K]`` of a linear layer, and its bias ``[N]``."""

Reduced = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""``[T]`` float32 each: a value of every row of logits, and its normaliser: the peak, the log of the sum above it."""


@dataclass(frozen=True)
class AttentionOptions:
    """Tells one attention layer from another.

    Attributes:
        layer: which pages of the context are its own.
        scale: factor on the scores.
        window: a token sees itself and the ``window - 1`` before it; 0 for all.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 for off.
    """

    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class GatedNormOptions:
    """Says how a gated RMSNorm works: each of ``groups`` parts of the axis alone, the gate before or after the norm."""

    eps: float
    groups: int
    gate_first: bool


@dataclass(frozen=True)
class SSMOptions:
    """Tells one Mamba layer from another.

    Attributes:
        layer: which part of the state memory is its own.
        chunk: of the grid that states are kept on (``ssm_chunk``).
        groups: heads share B and C in this many groups.
        state_size: N.
        dt_limits: bounds of the time step.
    """

    layer: int
    chunk: int
    groups: int
    state_size: int
    dt_limits: tuple[float, float] = (0.0, float("inf"))
