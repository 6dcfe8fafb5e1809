"""Paged attention in Triton and its gradients are near the float64 oracle by several routes through the pages."""

import pytest
import torch

from samebit.kernels.layout.forward_context import training_context
from samebit.kernels.ops.attention import attention
from samebit.kernels.triton.gradients import attention as gradients
from samebit.kernels.triton.tiles.file import AttentionEntry, AttentionTile

from ..attention_layer import Shape, oracle, tensors, through_pages
from ..helpers import assert_near, leaves
from ..routes import ROUTES, left_padding, padded
from ..shared_prefixes import Decode, Group
from .gpu import DEVICE, EVERY, leaf

pytestmark = pytest.mark.usefixtures("on_gpu")

LENGTHS = (1, 66, 129) if EVERY else (1, 129)


CASES = (
    (Shape(2, 2, 32), torch.float32),
    (Shape(4, 2, 50, window=20, has_sinks=True), torch.bfloat16),
    (Shape(6, 2, 64, softcap=2.0), torch.float16),
    (Shape(7, 1, 80, window=65, has_sinks=True), torch.float32),
    (Shape(2, 1, 129, window=64, softcap=5.0), torch.bfloat16),
)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_every_route_through_the_pages_is_near_the_oracle(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype, LENGTHS)
    expected = oracle(*parts, shape, LENGTHS)
    for block_size, route in ((64, "whole"), (128, "chunks")):
        found = through_pages(parts, shape, LENGTHS, block_size, ROUTES[route], padding=1, device=DEVICE)
        assert_near(found, expected, 4)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_training_and_its_gradients_are_near_the_oracle(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype, LENGTHS)
    sinks = () if shape.sinks is None else (shape.sinks,)
    mask = left_padding(LENGTHS)
    real = mask.flatten().bool()
    mine, mine_sinks = [leaf(padded(x, mask)) for x in parts], [leaf(x) for x in sinks]
    exact, exact_sinks = leaves(*(x.double() for x in parts)), leaves(*(x.double() for x in sinks))
    context = training_context(mask.shape, mask, None, DEVICE)
    out = attention(*mine, context, shape.options, *mine_sinks)
    expected = oracle(*exact, shape, LENGTHS, *exact_sinks)
    upstream = torch.randn(len(real), *out.shape[1:]).to(dtype)
    out.backward(upstream.to(DEVICE))
    expected.backward(upstream[real].double())
    assert_near(out[real.to(DEVICE)], expected, 4)
    assert not out[~real.to(DEVICE)].any()
    for x, y in zip(mine, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert_near(x.grad[real.to(DEVICE)], y.grad, 8)
        assert not x.grad[~real.to(DEVICE)].any()
    for x, y in zip(mine_sinks, exact_sinks, strict=True):
        assert_near(x.grad.to(dtype), y.grad, 8)  # of rows in this dtype


@pytest.mark.parametrize(("rows", "of_keys"), [(128, 16), (16, 128)])
def test_gradients_of_queries_and_of_keys_may_have_a_tile_each(
    rows: int, of_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile, other = AttentionTile(rows, 8, 2), AttentionTile(of_keys, 8, 1)
    monkeypatch.setattr(gradients, "attention_tiles", lambda *of: AttentionEntry(("any",), tile, tile, keys=other))
    heads, kv_heads = (6, 2) if EVERY else (3, 1)
    shape = Shape(heads, kv_heads, 64, window=70, softcap=2.0)
    test_training_and_its_gradients_are_near_the_oracle(shape, torch.float32)


GROUPED = (
    (Shape(2, 2, 32, has_sinks=True), torch.float32, 64, (Group(200, (201, 230, 265)),), [3]),
    (Shape(4, 1, 100), torch.bfloat16, 64, (Group(64, (70,) * 17), Group(65, (66, 130))), [2, 16]),
    (Shape(4, 2, 256, window=100), torch.float32, 64, (Group(200, (201, 260, 300, 420)), Group(64, (65, 70))), [2, 4]),
    (Shape(8, 1, 32, softcap=2.0), torch.float16, 64, (Group(63, (80, 90)), Group(0, (70,)), Group(64, (65, 66))), [2]),
    (
        Shape(6, 2, 50, 20, 5.0, has_sinks=True),
        torch.float32,
        128,
        (Group(128, (129, 135, 300)), Group(90, (100,))),
        [3],
    ),
)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("shape", "dtype", "block_size", "groups", "sizes"), GROUPED, ids=str)
def test_sequences_that_share_blocks_are_near_the_oracle(
    shape: Shape, dtype: torch.dtype, block_size: int, groups: tuple[Group, ...], sizes: list[int], mixed: bool
) -> None:
    decode = Decode(shape, dtype, groups, mixed)
    found, context = decode.found(block_size, DEVICE)
    (items,) = context.on_device.items_of.values()
    assert sorted(items.kept[:, 2].tolist()) == sizes, "rows of each item with several sequences"
    assert_near(torch.cat(found), torch.cat(decode.expected()), 4)


def test_a_sequence_that_computes_several_tokens_beside_a_group() -> None:
    decode = Decode(Shape(4, 2, 32), torch.float32, (Group(130, (140, 135, 150, 131)),))
    found, context = decode.found(64, DEVICE, long=1)
    (items,) = context.on_device.items_of.values()
    assert items.kept[:, 2].tolist() == [3]
    assert_near(found.pop(1), decode.expected(3)[1], 4)
    expected = decode.expected()
    assert_near(torch.cat(found), torch.cat(expected[:1] + expected[2:]), 4)
