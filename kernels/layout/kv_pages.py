"""Lay out paged KV memory: what a block is in bytes, and where the parts of it are.

Of keys and values ``pages[layer]`` is ``[blocks, kv_heads, 2, D * B]``: half 0 holds keys as ``[D, B]``, half 1 values
as ``[B, D]``; on a GPU keys are ``[B, D]`` too. Of latents it is ``[blocks, B, rank + rope]``: a token's latent and its
rotated key, side by side. A layer with an indexer has a second tensor behind that, its index keys, ``[blocks, B,
index]``. Block 0 is the null block: padding rows write there and it is never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samebit.kernels.layout.memory_pool import zeroed_pool


@dataclass(frozen=True)
class KVLayout:
    """Describes the shape of a model's KV memory: one attention layer after the other, all alike."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block over all layers, keys and values."""
        return self.num_layers * self.num_kv_heads * 2 * self.head_dim * block_size * dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> tuple[torch.Tensor, ...]:
        """Allocate zeroed pages for blocks 0 .. num_blocks, one tensor a layer."""
        shape = (num_blocks + 1, self.num_kv_heads, 2, self.head_dim * block_size)
        return tuple(zeroed_pool(shape, dtype, device) for _ in range(self.num_layers))


@dataclass(frozen=True)
class MixedLayout:
    """Describes the shape of KV memory whose layers differ: ``heads`` holds of each its KV heads, and their size."""

    heads: tuple[tuple[int, int], ...]

    @property
    def num_layers(self) -> int:
        """Return the number of attention layers."""
        return len(self.heads)

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block over all layers, keys and values."""
        return sum(count * size for count, size in self.heads) * 2 * block_size * dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> tuple[torch.Tensor, ...]:
        """Allocate zeroed pages for blocks 0 .. num_blocks, one tensor a layer."""
        shapes = [(num_blocks + 1, count, 2, size * block_size) for count, size in self.heads]
        return tuple(zeroed_pool(shape, dtype, device) for shape in shapes)


def layout_of_heads(heads: Sequence[tuple[int, int]]) -> KVLayout | MixedLayout:
    """Return the layout of attention layers, given of each its KV heads and their size."""
    if len({*heads}) > 1:
        return MixedLayout(tuple(heads))
    return KVLayout(len(heads), *heads[0]) if heads else KVLayout(0, 0, 0)


@dataclass(frozen=True)
class LatentLayout:
    """Describes the memory of a model whose attention reads latents (MLA): one layer after the other, all alike.

    Attributes:
        num_layers: attention layers.
        rank: elements of a token's latent, which its value and all but the rotated part of its key are made of.
        rope: elements of its rotated key, which all heads share.
    """

    num_layers: int
    rank: int
    rope: int

    @property
    def width(self) -> int:
        """Return the elements of a token in a layer."""
        return self.rank + self.rope

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block over all layers."""
        return self.num_layers * self.width * block_size * dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> tuple[torch.Tensor, ...]:
        """Allocate zeroed pages for blocks 0 .. num_blocks, one tensor a layer."""
        shape = (num_blocks + 1, block_size, self.width)
        return tuple(zeroed_pool(shape, dtype, device) for _ in range(self.num_layers))


@dataclass(frozen=True)
class SparseLayout:
    """Describes the memory of a model whose attention reads chosen latents (DSA): one layer after the other.

    Attributes:
        rank, rope: as in `LatentLayout`.
        index: elements of a token's index key.
        indexed: whether each layer has index keys; one without takes the choice of a layer before.
    """

    rank: int
    rope: int
    index: int
    indexed: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        """Return the number of attention layers."""
        return len(self.indexed)

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the elements of a token in each tensor: of every layer its latents, then its index keys."""
        both = self.rank + self.rope, self.index
        return tuple(width for indexed in self.indexed for width in (both if indexed else both[:1]))

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block over all layers."""
        return sum(self.widths) * block_size * dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> tuple[torch.Tensor, ...]:
        """Allocate zeroed pages for blocks 0 .. num_blocks, a tensor for each of `widths`."""
        return tuple(zeroed_pool((num_blocks + 1, block_size, width), dtype, device) for width in self.widths)


PageLayout = KVLayout | MixedLayout | LatentLayout | SparseLayout
"""What a block of a model holds."""
