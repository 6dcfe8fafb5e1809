"""A row of a decode step has the same bits on the CPU alone and beside sequences that read the same blocks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.kv_pages import KVLayout
from samebit.kernels.ops.attention import attention

from .attention_layer import Shape
from .helpers import DTYPES, THREADS, threads

SHAPES = (
    Shape(4, 2, 50),
    Shape(7, 1, 80, softcap=2.0),
    Shape(6, 6, 33, has_sinks=True),
    Shape(4, 2, 64, window=100),
)
COMMON = (0, 256, 280, 130, 190, 64, 64)
"""Lists how many tokens each sequence has in common with the one before it."""
STARTS = (330, 300, 300, 200, 193, 129, 70)


def decode(
    shape: Shape, block_size: int, dtype: torch.dtype, tokens: tuple[int, ...] = STARTS,
    in_common: tuple[int, ...] = COMMON, rows: tuple[int, ...] = (1,),
) -> ForwardContext:  # fmt: skip
    """Lay out a step of sequences that have these tokens, four times, in blocks of their own but for those in common;
    pages hold random numbers, and NaN where no token is. Sequences compute so many `rows`, in turns."""
    width = -(-(max(tokens) + max(rows)) // block_size)
    layout = KVLayout(1, shape.kv_heads, shape.head_dim)
    starts = np.array(tokens * 4, np.int32)
    tables = np.arange(1, len(starts) * width + 1, dtype=np.int32).reshape(len(starts), width)
    for place in range(1, len(starts)):
        common = min(in_common[place % len(in_common)], starts[place]) // block_size
        tables[place, :common] = tables[place - 1, :common]
    pages = layout.allocate(len(starts) * width, block_size, dtype)[0].normal_()
    for table, start in zip(tables, starts, strict=True):
        last = table[start // block_size]
        pages[table[start // block_size + 1 :]] = torch.nan
        pages[last].view(shape.kv_heads, 2, -1)[:, 0].view(-1, shape.head_dim, block_size)[
            ..., start % block_size :
        ] = torch.nan
        pages[last, :, 1].view(-1, block_size, shape.head_dim)[:, start % block_size :] = torch.nan
    count = len(starts)
    lengths = np.resize(np.array(rows, np.int32), count)
    return ForwardContext(
        positions=torch.zeros(int(lengths.sum()), dtype=torch.int64),
        row_start=(np.cumsum(lengths) - lengths).astype(np.int32),
        lengths=lengths,
        starts=starts,
        table_rows=np.arange(count, dtype=np.int32),
        block_tables=tables,
        block_size=block_size,
        pages=(pages,),
    )


def check_each_alone(shape: Shape, together: ForwardContext, dtype: torch.dtype) -> None:
    """Compare the rows of a step with each computed by itself."""
    count = together.num_rows
    q = 3 * torch.randn(count, shape.heads, shape.head_dim)
    k, v = torch.randn(2, count, shape.kv_heads, shape.head_dim)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    for number in THREADS:
        with threads(number):
            found = attention(q, k, v, together, shape.options, shape.sinks)
        for sequence, (row, length) in enumerate(zip(together.row_start, together.lengths, strict=True)):
            only, one = slice(row, row + length), slice(sequence, sequence + 1)
            alone = replace(
                together,
                positions=together.positions[only],
                row_start=together.row_start[:1],
                lengths=together.lengths[one],
                starts=together.starts[one],
                table_rows=together.table_rows[one],
            )
            expected = attention(q[only], k[only], v[only], alone, shape.options, shape.sinks)
            assert torch.equal(found[only], expected), sequence
        assert not found.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_beside_others_that_read_the_same_blocks_have_the_bits_of_each_alone(
    shape: Shape, block_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    together = decode(shape, block_size, dtype)
    assert together.bunches[:-1, 1].tolist() == 4 * [4, 2, 1]
    check_each_alone(shape, together, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [Shape(4, 1, 16), Shape(5, 1, 40), Shape(2, 2, 129)], ids=str)
@pytest.mark.parametrize("common", [64, 320])
def test_samples_that_go_on_for_long_have_the_bits_of_each_alone(shape: Shape, common: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tokens = tuple(common + own for own in (400, 1, 0, 700, 63, 450, 511, 512))  # more chunks than are asked for ahead
    together = decode(shape, 64, dtype, tokens, (0, *(common,) * 7))
    assert together.bunches[:-1].tolist() == [[first, common // 64] for first in range(0, 32, 8)]
    check_each_alone(shape, together, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [(1, 8, 1), (1, 1, 1, 40, 30, 2, 1), (5,)], ids=str)
def test_guessed_tokens_beside_decodes_that_read_the_same_blocks_have_the_bits_of_each_alone(
    shape: Shape, rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    together = decode(shape, 16, dtype, rows=rows)
    assert (together.bunches[:-1, 1] > 0).sum() >= 8
    assert max(map(int, np.add.reduceat(together.lengths[together.tiles[:, 0]], together.bunches[:-1, 0]))) <= 64
    check_each_alone(shape, together, dtype)


def test_siblings_are_bunched_wherever_they_stand_in_the_call() -> None:
    starts = np.full(6, 70, np.int32)
    tables = np.array([[1, 2], [3, 4], [1, 5], [1, 6], [3, 7], [3, 8]], np.int32)
    context = ForwardContext(
        positions=torch.zeros(6, dtype=torch.int64),
        row_start=np.arange(6, dtype=np.int32),
        lengths=np.ones(6, np.int32),
        starts=starts,
        table_rows=np.arange(6, dtype=np.int32),
        block_tables=tables,
        block_size=64,
    )
    assert context.tiles.tolist() == [[0, 0], [2, 0], [3, 0], [1, 0], [4, 0], [5, 0]]
    assert context.bunches.tolist() == [[0, 1], [3, 1], [6, 0]]
