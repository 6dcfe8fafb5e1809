"""Multiply each expert with its rows: one launch over (expert, tile of its rows) and tiles of outputs.

Invariant: a row's products are the chain of `matmul`, with the tile of a linear layer of these inputs and outputs, and
so have the bits of that layer. Which rows share a tile does not matter. Other tiles compute calls of few rows an
expert, only where their bits were seen to be equal, by the kernel that is launched here.

P sorted pairs, K inputs, N outputs.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.triton.experts.sorting import ITEM, Pairs
from samebit.kernels.triton.matmul import GROUP, chain, tile_of_program
from samebit.kernels.triton.numeric import aligned, jit
from samebit.kernels.triton.tiles.file import MatmulTile
from samebit.kernels.triton.tiles.proved_equal import tiles_of
from samebit.kernels.triton.tiles.table import matmul_tiles

_ITEM = tl.constexpr(ITEM)


@dataclass(frozen=True)
class OneExpert:
    """Multiplies as `matmul.multiply_first` does: all rows are those of one expert, with the kernel of a whole layer.

    Attributes:
        top_k: how many experts a row has whose rows are gathered; 0: they are not.
        transposed: the layer's weights have inputs before outputs.
    """

    top_k: int
    transposed: bool

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: MatmulTile, outputs: int
    ) -> torch.Tensor:
        held = weight.shape[1]
        if self.transposed:
            whole = weight.new_zeros(len(weight), outputs)
            whole[:, :held] = weight
            weight = whole[:, :held]
        count = torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)
        choice_of = torch.arange(len(x), dtype=torch.int32, device=x.device) * max(self.top_k, 1)
        pairs = Pairs(choice_of, choice_of[:, None], count)
        return _launch(x, weight[None], bias, pairs, tile, self.top_k, outputs)[:, :held]


def multiply_grouped(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pairs: Pairs, *, gathered: bool
) -> torch.Tensor:
    """Multiply each pair's row with its expert's weight: ``[P, N]`` in the dtype of x.

    ``x``: ``[P, K]`` in the order of the pairs, or ``[T, K]`` if it is to be ``gathered``. ``weight``: ``[E, K, N]``,
    contiguous or the transpose of what is; ``bias``: ``[E, N]``.
    """
    experts, inputs, outputs = weight.shape
    top_k = pairs.top_k if gathered else 0
    multiply = OneExpert(top_k, transposed=weight.stride(2) == 1)
    tiles = tiles_of(x.device, inputs, outputs, x.dtype, bias is not None, multiply)
    tile = tiles.for_rows(ceil_div(len(pairs.choice_of), experts))
    return _launch(x, weight, bias, pairs, tile, top_k, outputs)


def gradient_of_rows(
    grad: torch.Tensor, weight: torch.Tensor, pairs: Pairs, *, gathered: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply with the transposed weights: ``[P, K]`` in this dtype; ``grad`` as ``x`` above, of N elements a row."""
    _, inputs, outputs = weight.shape
    tile = matmul_tiles(grad.device, inputs, outputs, weight.dtype).tile
    return _launch(grad, weight.mT, None, pairs, tile, pairs.top_k if gathered else 0, inputs, dtype)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pairs: Pairs,
    tile: MatmulTile,
    top_k: int,
    outputs: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the first of an expert's ``outputs``, those that ``weight`` and ``bias`` hold; ``top_k`` 0: no gather."""
    _, inputs, held = weight.shape
    out = torch.empty(len(pairs.choice_of), outputs, dtype=dtype or x.dtype, device=x.device)
    items, output_tiles = pairs.items(tile.rows), ceil_div(held, tile.outputs)
    if out.numel():
        _multiply_items[(len(items) * output_tiles,)](
            aligned(x), weight, out if bias is None else aligned(bias), out, items, pairs.choice_of, len(items),
            output_tiles, inputs, outputs, *weight.stride()[1:], top_k, bias is not None,
            inputs % tile.depth == 0, tile.rows, tile.outputs, tile.depth, GROUP, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
    return out


@jit(do_not_specialize=["item_count", "output_tiles"])
def _multiply_items(
    x: tensor, weight: tensor, bias: tensor, out: tensor, items: tensor, choice_of: tensor, item_count: tensor,
    output_tiles: tensor, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WEIGHT_INPUT: tl.constexpr,
    WEIGHT_OUTPUT: tl.constexpr, TOP_K: tl.constexpr, BIASED: tl.constexpr, WHOLE: tl.constexpr,
    ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr, DEPTH_TILE: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    item, output_tile = tile_of_program(item_count, output_tiles, GROUP)
    expert = tl.load(items + _ITEM * item).to(tl.int64)
    first, end = tl.load(items + _ITEM * item + 1), tl.load(items + _ITEM * item + 2)
    if first < end:
        pair = first + tl.arange(0, ROW_TILE)
        output = output_tile * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
        real_pairs, real_outputs = pair[:, None] < end, output[None, :] < OUTPUTS
        row = pair
        if TOP_K > 0:
            row = tl.load(choice_of + pair, mask=pair < end, other=0) // TOP_K
        row_at = x + row.to(tl.int64)[:, None] * INPUTS
        output_at = weight + expert * (INPUTS * OUTPUTS) + output.to(tl.int64)[None, :] * WEIGHT_OUTPUT
        acc = chain(
            row_at, output_at, real_pairs, real_outputs, INPUTS, 1, WEIGHT_INPUT, WHOLE, ROW_TILE, OUTPUT_TILE,
            DEPTH_TILE,
        )  # fmt: skip
        if BIASED:
            own = bias + expert * OUTPUTS + output
            acc += tl.load(own, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
        out_at = out + pair.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=real_pairs & real_outputs)
