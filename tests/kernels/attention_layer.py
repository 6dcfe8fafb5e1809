"""Give tests an attention layer: its inputs, its oracle, and its way through pages."""

from dataclasses import dataclass

import torch

from samebit.kernels.layout.kv_pages import KVLayout
from samebit.kernels.layout.options import AttentionOptions
from samebit.kernels.ops.attention import attention

from . import reference
from .paged import Pages, keep
from .routes import NextCount, steps

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Holds the sizes and options of one attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def sinks(self) -> torch.Tensor | None:
        """Return a sink for each head: from below all scores to above them."""
        return torch.linspace(-20.0, 20.0, self.heads) if self.has_sinks else None

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(0, self.head_dim**-0.5, self.window, self.softcap)


def tensors(shape: Shape, dtype: torch.dtype, lengths: tuple[int, ...]) -> Triple:
    torch.manual_seed(shape.head_dim)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(sum(lengths), count, shape.head_dim).to(dtype) for count in heads)
    return q * 3, k, v


def oracle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape, lengths: tuple[int, ...],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute in float64; `sinks` are the shape's own unless given."""
    options = shape.options
    sinks = shape.sinks if sinks is None else sinks
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat(
        [
            reference.attention(*part, sinks, scale=options.scale, window=options.window, softcap=options.softcap)
            for part in parts
        ]
    )


def through_pages(
    parts: Triple, shape: Shape, lengths: tuple[int, ...], block_size: int, next_count: NextCount, *,
    padding: int = 0, device: str = "cpu",
) -> torch.Tensor:  # fmt: skip
    """Attend in steps: in each, sequence s computes its next ``next_count(s, done)`` tokens.

    Pages begin as NaN, blocks are dealt out at random, and ``padding`` rows of NaN end each call.
    """
    layout = KVLayout(1, shape.kv_heads, shape.head_dim)
    pages = Pages.deal(layout, lengths, block_size, parts[0].dtype, device)
    out = torch.empty_like(parts[0])
    sinks = None if shape.sinks is None else shape.sinks.to(device)
    for step in steps(lengths, next_count):
        call = pages.call(parts, step, padding)
        result = attention(*call, pages.context(step, padding), shape.options, sinks).cpu()
        keep(result, step, out)
    return out
