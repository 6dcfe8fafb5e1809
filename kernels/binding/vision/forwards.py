"""Define the forwards of a vision tower's modules.

Invariants:

* A patch's hidden state depends on the patches of its own segment alone: an image, or a window of one. So an image has
  the same features whatever other images are in the call.
* Nothing here reads the layout of a call: the rows of a tower are patches, not tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from samebit.kernels.layout.vision.segments import Segments
from samebit.kernels.ops.activation import activated
from samebit.kernels.ops.linear import linear
from samebit.kernels.ops.segment_attention import segment_attention

_MOST_KNOWN = 4
"""The most layouts of segments that are kept: those of two calls, of windows and whole images each."""


@dataclass(frozen=True, eq=False)
class AnglesFacts:
    """Holds the inverse frequencies ``[R]`` float32 of rows and of columns."""

    frequencies: torch.Tensor


class Float32Angles(torch.Tensor):
    """Stays in float32 where FSDP2 casts what it hands to a block; what is computed of it is one, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as for any tensor, but for a cast: that gives the tensor itself."""
        return args[0] if func is torch.Tensor.to else super().__torch_function__(func, types, args, kwargs or {})


@dataclass(frozen=True, eq=False)
class KnownSegments:
    """Lays segments out once for all blocks of a call: whole images, and windows of them."""

    _known: dict[tuple[tuple[int, ...], torch.device], Segments] = field(default_factory=dict)

    def of(self, bounds: torch.Tensor, device: torch.device) -> Segments:
        """Return the segments that begin and end at these rows ``[S + 1]``."""
        key = tuple(bounds.diff().tolist()), device
        found = self._known.get(key)
        if found is None:
            found = Segments.of(key[0], device)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()  # a trainer's thread may do so while a worker's looks
            self._known[key] = found
        return found


@dataclass(frozen=True, eq=False)
class VisionAttentionFacts:
    """Holds the count of heads, the factor on their scores, and the segments that all blocks of a tower have."""

    heads: int
    scale: float
    segments: KnownSegments


def patches_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Make hidden states ``[N, W]`` of patches ``[N, C]``: kernels that do not overlap are rows of one matrix."""
    weight = self.proj.weight
    return linear(hidden_states.to(weight.dtype), weight.flatten(1), self.proj.bias)


def angles_forward(self: Any, *args: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
    """Return the angles ``[N, 2 R]`` of patches at these rows and columns ``[N, 2]``; where the hidden states are given
    before them, as since transformers 5.24, cosines and sines ``[N, 4 R]`` of these, twice."""
    facts: AnglesFacts = self.samebit
    positions = args[-1] if position_ids is None else position_ids
    angles = (positions[..., None].float() * facts.frequencies.to(positions.device)).flatten(1)
    angles = angles.as_subclass(Float32Angles)
    if len(args) + (position_ids is not None) == 1:
        return angles
    both = torch.cat([angles, angles], dim=-1)
    return both.cos(), both.sin()


def vision_attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_: Any,
) -> torch.Tensor:
    """Compute attention among the patches of each segment; the segments begin at ``cu_seqlens`` ``[S + 1]``."""
    facts: VisionAttentionFacts = self.samebit
    rows = len(hidden_states)
    q, k, v = self.qkv(hidden_states).reshape(rows, 3, facts.heads, -1).unbind(1)
    cos, sin = (part.as_subclass(torch.Tensor).unsqueeze(1) for part in position_embeddings)
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    out = segment_attention(q, k, v, facts.segments.of(cu_seqlens, q.device), facts.scale)
    projected: torch.Tensor = self.proj(out.reshape(rows, -1))
    return projected


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[N, H, D]`` by cosines and sines ``[N, 1, D]`` in float32, and round once."""
    low, high = x.float().chunk(2, dim=-1)
    turned = torch.cat([-high, low], dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


def gelu_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute GELU as this module's ``approximate`` says."""
    return activated("gelu" if self.approximate == "none" else "gelu_pytorch_tanh", x)
