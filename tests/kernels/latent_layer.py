"""Give tests a layer of attention over latents: its inputs, its oracle, and its way through pages."""

from dataclasses import dataclass

import torch

from samebit.kernels.layout.kv_pages import LatentLayout
from samebit.kernels.layout.options import LatentOptions
from samebit.kernels.ops.latent.attention import latent_attention

from . import reference
from .paged import Pages, keep
from .routes import NextCount, steps

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Holds the sizes of one layer."""

    heads: int
    rank: int
    rope: int

    @property
    def options(self) -> LatentOptions:
        return LatentOptions(0, 1.3 * (self.rank + self.rope) ** -0.5, self.rank, self.rope)


def tensors(shape: Shape, dtype: torch.dtype, lengths: tuple[int, ...]) -> Pair:
    torch.manual_seed(shape.rank)
    q = torch.randn(sum(lengths), shape.heads, shape.options.width) * 3
    return q.to(dtype), torch.randn(sum(lengths), shape.options.width).to(dtype)


def oracle(q: torch.Tensor, latents: torch.Tensor, shape: Shape, lengths: tuple[int, ...]) -> torch.Tensor:
    """Attend in float64 with one KV head, whose value is the beginning of its key."""
    pairs = zip(q.split(lengths), latents[:, None].split(lengths), strict=True)
    scale = shape.options.scale
    return torch.cat(
        [reference.attention(queries, keys, keys, None, scale=scale)[..., : shape.rank] for queries, keys in pairs]
    )


def through_pages(
    parts: Pair, shape: Shape, lengths: tuple[int, ...], block_size: int, next_count: NextCount, *,
    padding: int = 0, device: str = "cpu",
) -> torch.Tensor:  # fmt: skip
    """Attend in steps: in each, sequence s computes its next ``next_count(s, done)`` tokens.

    Pages begin as NaN, blocks are dealt out at random, and ``padding`` rows of NaN end each call.
    """
    layout = LatentLayout(1, shape.rank, shape.rope)
    pages = Pages.deal(layout, lengths, block_size, parts[0].dtype, device)
    out = torch.empty(*parts[0].shape[:2], shape.rank, dtype=parts[0].dtype)
    for step in steps(lengths, next_count):
        q, latents = pages.call(parts, step, padding)
        result = latent_attention(q, latents, pages.context(step, padding), shape.options).cpu()
        keep(result, step, out)
    return out
