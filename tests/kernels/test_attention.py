"""Paged attention is near the oracle, with the same bits by any route through the pages, gradients too."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from samebit.kernels.cpu.attention import forward, groups
from samebit.kernels.layout.forward_context import training_context
from samebit.kernels.layout.kv_pages import KVLayout
from samebit.kernels.layout.options import HeadNorms
from samebit.kernels.ops.attention import attention, attention_of_rotated
from samebit.kernels.ops.norm import rms_norm
from samebit.kernels.ops.rope import RotaryTables, rotary_tables, rotate

from .attention_layer import Shape, oracle, tensors, through_pages
from .helpers import DTYPES, THREADS, assert_near, leaves, threads
from .routes import ROUTES, left_padding, packed_context, padded, ways

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LENGTHS = (1, 2, 63, 64, 65, 130)


SHAPES = (
    Shape(4, 4, 32),
    Shape(4, 2, 50, window=20),
    Shape(6, 2, 64, softcap=2.0),
    Shape(7, 1, 80, window=65),
    Shape(8, 2, 128, window=64, softcap=5.0),
    Shape(6, 2, 48, has_sinks=True),
    Shape(7, 1, 33, window=20, softcap=2.0, has_sinks=True),
)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_route_through_the_pages_gives_the_training_bits(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype, LENGTHS)
    expected = attention(*parts, packed_context(LENGTHS), shape.options, shape.sinks)
    assert_near(expected, oracle(*parts, shape, LENGTHS), 4)
    turn = SHAPES.index(shape) + DTYPES.index(dtype)
    for number, (block_size, route) in enumerate(ways((4, 16, 64, 256), turn)):
        with threads(THREADS[number % len(THREADS)]):
            got = through_pages(parts, shape, LENGTHS, block_size, ROUTES[route], padding=number % 3)
        assert torch.equal(got, expected), (block_size, route)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_layout_or_threads(shape: Shape) -> None:
    parts = tensors(shape, torch.float32, LENGTHS)
    expected = attention(*parts, packed_context(LENGTHS), shape.options, shape.sinks)
    mask = left_padding(LENGTHS)
    real = mask.flatten().bool()
    spread = [padded(x, mask) for x in parts]
    for number in THREADS:
        with threads(number):
            out = attention(*spread, training_context(mask.shape, mask, None), shape.options, shape.sinks)
            assert torch.equal(out[real], expected)
            assert not out[~real].any()
            trained = attention(*leaves(*parts), packed_context(LENGTHS), shape.options, shape.sinks)
            assert torch.equal(trained.detach(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_near_the_oracle_and_equal_for_any_thread_count(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype, LENGTHS)
    upstream = torch.randn(parts[0].shape).to(dtype)
    sinks = () if shape.sinks is None else (shape.sinks,)
    exact = leaves(*(x.double() for x in (*parts, *sinks)))
    oracle(*exact[:3], shape, LENGTHS, *exact[3:]).backward(upstream.double())
    found = []
    for number in THREADS:
        mine = leaves(*parts, *sinks)
        with threads(number):
            attention(*mine[:3], packed_context(LENGTHS), shape.options, *mine[3:]).backward(upstream)
        found.append([x.grad for x in mine])
    for grad, x in zip(found[0], exact, strict=True):
        assert_near(grad.to(dtype), x.grad, 8)  # the sinks' is float32, of rows in this dtype
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("window", [1, 3, 7, 8, 9])
def test_gradients_of_windows_of_few_tokens_are_near_the_oracle(window: int) -> None:
    """Gradients are near the oracle where of keys that are computed together some rows see none."""
    shape = Shape(6, 2, 40, window=window)
    parts = tensors(shape, torch.float32, LENGTHS)
    upstream = torch.randn(parts[0].shape)
    exact, mine = leaves(*(x.double() for x in parts)), leaves(*parts)
    oracle(*exact, shape, LENGTHS).backward(upstream.double())
    attention(*mine, packed_context(LENGTHS), shape.options).backward(upstream)
    for x, grad in zip(mine, (x.grad for x in exact), strict=True):
        assert x.grad is not None
        assert_near(x.grad, grad, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_has_no_gradient(dtype: torch.dtype) -> None:
    shape = SHAPES[0]
    mask = left_padding(LENGTHS)
    mine = leaves(*(padded(x, mask) for x in tensors(shape, dtype, LENGTHS)))
    out = attention(*mine, training_context(mask.shape, mask, None), shape.options)
    out.backward(torch.full_like(out, torch.nan).where(~mask.flatten().bool()[:, None, None], out.detach()))
    for x in mine:
        assert x.grad is not None
        assert not x.grad[~mask.flatten().bool()].any()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("row", [0, 1, 62, 63, 64, 101, 129])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3]], ids=str)
def test_the_gradient_of_a_row_reaches_the_keys_that_it_sees_and_no_others(shape: Shape, row: int) -> None:
    """A row's gradient reaches no key that it does not see, even where several rows are computed at a time: a NaN that
    came along with a weight of 0 would stay.
    """
    (length,) = lengths = (130,)
    mine = leaves(*tensors(shape, torch.float32, lengths))
    upstream = torch.ones(mine[0].shape)
    upstream[row] = torch.nan
    attention(*mine, packed_context(lengths), shape.options).backward(upstream)
    tokens = torch.arange(length)
    seen = (tokens <= row) & (tokens > row - (shape.window or length))
    for x, reached in zip(mine, (tokens == row, seen, seen), strict=True):
        assert x.grad is not None
        assert torch.equal(x.grad.isnan().flatten(1).any(1), reached)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rotated", "normed"), [(3, False), (16, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_and_rotation_on_the_way_to_the_pages_change_no_bit(
    shape: Shape, rotated: int, normed: bool, dtype: torch.dtype
) -> None:
    q, k, v = tensors(shape, dtype, LENGTHS)
    given = q, k, v
    norms = HeadNorms(*torch.randn(shape.head_dim, 2).to(dtype).T, 1e-6, 1.0) if normed else None
    if norms is not None:
        q, k = rms_norm(q, norms.queries, 1e-6, 1.0), rms_norm(k, norms.keys, 1e-6, 1.0)
    context = packed_context(LENGTHS)
    layout = KVLayout(1, shape.kv_heads, shape.head_dim)
    apart, together = (layout.allocate(context.num_blocks, context.block_size, dtype)[0] for _ in range(2))
    tables = rotary_tables(10000.0 ** (-torch.arange(rotated) / rotated), 1.25, replace(context, pages=(together,)))
    separate = replace(context, pages=(apart,))
    expected = attention(rotate(q, tables), rotate(k, tables), v, separate, shape.options, shape.sinks)
    for number in THREADS:
        with threads(number):
            together.zero_()
            found = attention_of_rotated(*given, tables, shape.options, shape.sinks, norms)
            assert torch.equal(found, expected)
            assert torch.equal(together, apart)
    without = RotaryTables(tables.cos, tables.sin, context)
    in_training = attention_of_rotated(*given, without, shape.options, shape.sinks, norms)
    assert torch.equal(in_training, expected)


def test_a_sink_takes_its_share_and_one_below_all_scores_none() -> None:
    shape = Shape(4, 2, 50)
    parts = tensors(shape, torch.float32, LENGTHS)
    plain = attention(*parts, packed_context(LENGTHS), shape.options)
    sinks = torch.tensor([-torch.inf, -1e4, 0.0, 1e4])
    out = attention(*parts, packed_context(LENGTHS), shape.options, sinks)
    assert torch.equal(out[:, :2], plain[:, :2])
    assert (out[:, 2].abs() < plain[:, 2].abs()).all()
    assert out[:, 3].abs().max() < 1e-30


def test_the_gradient_of_sinks_leaves_padding_out() -> None:
    shape = Shape(6, 2, 48, has_sinks=True)
    parts, sinks = tensors(shape, torch.float32, LENGTHS), shape.sinks
    assert sinks is not None
    mask = left_padding(LENGTHS)
    upstream = torch.randn(parts[0].shape)
    (packed,), (spread,) = leaves(sinks), leaves(sinks)
    attention(*parts, packed_context(LENGTHS), shape.options, packed).backward(upstream)
    padding = torch.where(mask.flatten().bool()[:, None, None], padded(upstream, mask), torch.nan)
    layout = training_context(mask.shape, mask, None)
    attention(*(padded(x, mask) for x in parts), layout, shape.options, spread).backward(padding)
    assert_near(spread.grad, packed.grad)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_what_a_thread_attends_to_next_is_looked_up_within_its_block_table(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No block beyond a table's end is looked up: the last table's sequence may have one block, less than a chunk."""
    monkeypatch.setattr(forward, "_locate", forward._locate.py_func)
    found = [np.full(4, -1, np.int64) for _ in range(4)]
    forward._locate_coming.py_func(
        np.array([[3], [5]], np.int32),
        groups.Shape(1, 1, 8, 8, block_size),
        groups.Place(table=0, row=0, position=0, count=1, kv_head=0),
        groups.Following(last_table=-1, table=1, kv_head=0, first=0, behind=0),
        64,
        0,
        groups.Pieces(None, block_size, *found),
    )
    page = 5 * 2 * 8 * block_size
    assert all(page <= place < page + block_size for place in found[2])
