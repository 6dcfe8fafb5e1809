"""Paged attention in Triton: near the float64 oracle by several routes through the pages, and its gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from samebit.kernels import device, reference
from samebit.kernels.attention import AttentionOptions, attention
from samebit.kernels.context import ForwardContext, training_context

from .gpu import DEVICE, assert_near, leaf

LENGTHS = (1, 3, 66, 129)


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(0, self.head_dim**-0.5, self.window, self.softcap)


CASES = (
    (Shape(2, 2, 32), torch.float32),
    (Shape(4, 2, 50, window=20), torch.bfloat16),
    (Shape(6, 2, 64, softcap=2.0), torch.float16),
    (Shape(7, 1, 80, window=65), torch.float32),
    (Shape(2, 1, 129, window=64, softcap=5.0), torch.bfloat16),
)

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tensors(shape: Shape, dtype: torch.dtype) -> Triple:
    torch.manual_seed(shape.head_dim)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(sum(LENGTHS), count, shape.head_dim).to(dtype) for count in heads)
    return q * 2, k, v


def oracle(parts: Triple, shape: Shape) -> torch.Tensor:
    split = zip(*(part.split(LENGTHS) for part in parts), strict=True)
    options = shape.options
    return torch.cat(
        [
            reference.attention(*part, scale=options.scale, window=options.window, softcap=options.softcap)
            for part in split
        ]
    )


def through_pages(parts: Triple, shape: Shape, block_size: int, next_count: Callable[[int, int], int]) -> torch.Tensor:
    """Attention in steps over pages that begin as NaN, with blocks dealt out at random and a row of NaN padding."""
    q, k, v = parts
    blocks = [-(-length // block_size) for length in LENGTHS]
    dealt = iter(np.random.default_rng(0).permutation(sum(blocks)) + 1)
    tables = np.full((len(LENGTHS) + 1, max(blocks)), np.iinfo(np.int32).max, np.int32)
    for sequence, count in enumerate(blocks):
        tables[sequence + 1, :count] = [next(dealt) for _ in range(count)]
    pages = torch.full(
        (sum(blocks) + 1, shape.kv_heads, 2, shape.head_dim * block_size), torch.nan, dtype=q.dtype, device=DEVICE
    )
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
            positions=torch.zeros(len(rows) + 1, dtype=torch.int64, device=DEVICE),
            row_start=(ends - counts).astype(np.int32),
            lengths=np.array(counts, np.int32),
            starts=np.array([done[s] for s in active], np.int32),
            table_rows=np.array(active, np.int32) + 1,
            block_tables=tables,
            block_size=block_size,
            pages=(pages,),
        )
        call = [torch.cat([x[rows], x.new_full((1, *x.shape[1:]), torch.nan)]).to(DEVICE) for x in (q, k, v)]
        result = attention(*call, context, shape.options).cpu()
        assert not result[len(rows) :].any(), "padding rows must be zero"
        out[rows] = result[: len(rows)]
        for s, n in zip(active, counts, strict=True):
            done[s] += n
    return out


def whole(sequence: int, done: int) -> int:
    return 1000


def chunks(sequence: int, done: int) -> int:
    return (1, 7, 64, 3, 17, 2)[(sequence + done) % 6]


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_every_route_through_the_pages_is_near_the_oracle(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype)
    expected = oracle(parts, shape)
    assert_near(through_pages(parts, shape, 16, whole), expected, 4)
    assert_near(through_pages(parts, shape, 4, chunks), expected, 4)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_training_and_its_gradients_are_near_the_oracle(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype)
    width = max(LENGTHS) + 3
    mask = torch.zeros(len(LENGTHS), width, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        mask[row, width - length :] = 1  # left padding, of NaN
    real = mask.flatten().bool()
    padded = [x.new_full((mask.numel(), *x.shape[1:]), torch.nan) for x in parts]
    for target, x in zip(padded, parts, strict=True):
        target[real] = x
    mine, exact = [leaf(x) for x in padded], [x.double().requires_grad_() for x in parts]
    context = training_context((len(LENGTHS), width), mask, None, DEVICE)
    out, expected = attention(*mine, context, shape.options), oracle((exact[0], exact[1], exact[2]), shape)
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
