"""Paged attention: near the oracle, the same bits by any route through the pages, gradients."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from samebit.kernels import reference
from samebit.kernels.attention import AttentionOptions, attention, attention_of_rotated
from samebit.kernels.context import ForwardContext, training_context
from samebit.kernels.pages import KVLayout
from samebit.kernels.rope import rotary_tables, rotate

from .helpers import DTYPES, THREADS, assert_near, leaves, threads

LENGTHS = (1, 2, 63, 64, 65, 130)


@dataclass(frozen=True)
class Shape:
    """The sizes and options of one attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(0, self.head_dim**-0.5, self.window, self.softcap)


SHAPES = (
    Shape(4, 4, 32),
    Shape(4, 2, 50, window=20),
    Shape(6, 2, 64, softcap=2.0),
    Shape(7, 1, 80, window=65),
    Shape(8, 2, 128, window=64, softcap=5.0),
)

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """In this mode torch fills what `torch.empty` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tensors(shape: Shape, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS) -> Triple:
    torch.manual_seed(shape.head_dim)
    total = sum(lengths)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(total, count, shape.head_dim).to(dtype) for count in heads)
    return q * 3, k, v


def packed_context(lengths: tuple[int, ...] = LENGTHS) -> ForwardContext:
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return training_context((1, sum(lengths)), None, positions)


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape) -> torch.Tensor:
    options = shape.options
    parts = zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True)
    return torch.cat(
        [
            reference.attention(*part, scale=options.scale, window=options.window, softcap=options.softcap)
            for part in parts
        ]
    )


def through_pages(
    parts: Triple, shape: Shape, block_size: int, next_count: Callable[[int, int], int], padding: int = 0
) -> torch.Tensor:
    """Attention in steps: in each, sequence s computes its next ``next_count(s, done)`` tokens.

    Pages begin as NaN, blocks are dealt out at random, and ``padding`` rows of NaN end each call.
    """
    q, k, v = parts
    blocks = [-(-length // block_size) for length in LENGTHS]
    width = max(blocks)
    dealt = iter(np.random.default_rng(0).permutation(sum(blocks)) + 1)
    tables = np.full((len(LENGTHS) + 1, width), np.iinfo(np.int32).max, np.int32)
    for sequence, count in enumerate(blocks):
        tables[sequence + 1, :count] = [next(dealt) for _ in range(count)]
    pages = KVLayout(1, shape.kv_heads, shape.head_dim).allocate(sum(blocks), block_size, q.dtype)[0]
    pages.fill_(torch.nan)
    offsets = np.cumsum((0, *LENGTHS))
    out = torch.empty_like(q)
    done = [0] * len(LENGTHS)
    while any(have < length for have, length in zip(done, LENGTHS, strict=True)):
        active = [s for s in np.random.default_rng(sum(done)).permutation(len(LENGTHS)) if done[s] < LENGTHS[s]]
        counts = [min(next_count(s, done[s]), LENGTHS[s] - done[s]) for s in active]
        rows = np.concatenate(
            [np.arange(offsets[s] + done[s], offsets[s] + done[s] + n) for s, n in zip(active, counts, strict=True)]
        )
        ends = np.cumsum(counts)
        context = ForwardContext(
            positions=torch.zeros(len(rows) + padding, dtype=torch.int64),
            row_start=(ends - counts).astype(np.int32),
            lengths=np.array(counts, np.int32),
            starts=np.array([done[s] for s in active], np.int32),
            table_rows=np.array(active, np.int32) + 1,
            block_tables=tables,
            block_size=block_size,
            pages=(pages,),
        )
        call = [torch.cat([x[rows], x.new_full((padding, *x.shape[1:]), torch.nan)]) for x in (q, k, v)]
        result = attention(*call, context, shape.options)
        assert not result[len(rows) :].any(), "padding rows must be zero"
        out[rows] = result[: len(rows)]
        for s, n in zip(active, counts, strict=True):
            done[s] += n
    return out


ROUTES: dict[str, Callable[[int, int], int]] = {
    "whole": lambda sequence, done: 1000,
    "token by token": lambda sequence, done: 1,
    "chunks": lambda sequence, done: (1, 7, 64, 3, 17, 2)[(sequence + done) % 6],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_route_through_the_pages_gives_the_training_bits(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype)
    expected = attention(*parts, packed_context(), shape.options)
    assert_near(expected, oracle(*parts, shape), 4)
    for number, (block_size, route) in enumerate((b, r) for b in (4, 16, 64, 256) for r in ROUTES):
        with threads(THREADS[number % len(THREADS)]):
            got = through_pages(parts, shape, block_size, ROUTES[route], padding=number % 3)
        assert torch.equal(got, expected), (block_size, route)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_layout_or_threads(shape: Shape) -> None:
    parts = tensors(shape, torch.float32)
    expected = attention(*parts, packed_context(), shape.options)
    width = max(LENGTHS) + 3
    mask = torch.zeros(len(LENGTHS), width, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        mask[row, width - length :] = 1  # left padding
    real = mask.flatten().bool()
    padded = [x.new_full((mask.numel(), *x.shape[1:]), torch.nan) for x in parts]
    for target, x in zip(padded, parts, strict=True):
        target[real] = x
    for number in THREADS:
        with threads(number):
            out = attention(*padded, training_context(mask.shape, mask, None), shape.options)
            assert torch.equal(out[real], expected)
            assert not out[~real].any()
            assert torch.equal(attention(*leaves(*parts), packed_context(), shape.options).detach(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_near_the_oracle_and_equal_for_any_thread_count(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype)
    upstream = torch.randn(parts[0].shape).to(dtype)
    exact = leaves(*(x.double() for x in parts))
    oracle(*exact, shape).backward(upstream.double())
    found = []
    for number in THREADS:
        mine = leaves(*parts)
        with threads(number):
            attention(*mine, packed_context(), shape.options).backward(upstream)
        found.append([x.grad for x in mine])
    for grad, x in zip(found[0], exact, strict=True):
        assert_near(grad, x.grad, 8)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [3, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotating_on_the_way_to_the_pages_changes_no_bit(shape: Shape, rotated: int, dtype: torch.dtype) -> None:
    q, k, v = tensors(shape, dtype)
    context = packed_context()
    layout = KVLayout(1, shape.kv_heads, shape.head_dim)
    apart, together = (layout.allocate(context.num_blocks, context.block_size, dtype)[0] for _ in range(2))
    tables = rotary_tables(10000.0 ** (-torch.arange(rotated) / rotated), 1.25, replace(context, pages=(together,)))
    expected = attention(rotate(q, tables), rotate(k, tables), v, replace(context, pages=(apart,)), shape.options)
    for number in THREADS:
        with threads(number):
            together.zero_()
            assert torch.equal(attention_of_rotated(q, k, v, tables, shape.options), expected)
            assert torch.equal(together, apart)
