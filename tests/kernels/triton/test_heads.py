"""Norms of heads, rotation and pages in one launch have the bits of a launch each, as has attention behind both."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.kv_pages import KVLayout
from samebit.kernels.layout.options import AttentionOptions, HeadNorms
from samebit.kernels.ops.attention import attention, attention_of_rotated
from samebit.kernels.ops.norm import rms_norm
from samebit.kernels.ops.rope import RotaryTables, rotate
from samebit.kernels.triton import heads

from .gpu import DEVICE, DTYPES, EVERY, all_in_turns, poisoned
from .launches import launches

SIZES = [(3, 1, 32, 16), (4, 2, 50, 6), (2, 2, 100, 50), (6, 3, 129, 64)]
"""Lists query and KV heads, elements of a head, angles."""

ROWS = (1, 2, 3, 7) if EVERY else (1, 3)
"""Lists counts of rows; three are a sequence of two tokens and one of one, which is all that seven have."""


@pytest.fixture(autouse=True)
def _nothing_known(on_gpu: None) -> None:
    heads.joins.cache_clear()


def step(rows: int, layout: KVLayout, dtype: torch.dtype) -> ForwardContext:
    """Lay out two tokens of one sequence, one of each other, as far as there are rows; and one row that is nobody's."""
    lengths = np.array([min(2, rows)] + [1] * max(0, rows - 2), np.int32)
    sequences = np.arange(len(lengths), dtype=np.int32)
    return ForwardContext(
        positions=torch.zeros(rows + 1, dtype=torch.int64, device=DEVICE),
        row_start=(np.cumsum(lengths) - lengths).astype(np.int32),
        lengths=lengths,
        starts=np.zeros(len(lengths), np.int32),
        table_rows=sequences,
        block_tables=1 + sequences[::-1, None].copy(),
        block_size=64,
        pages=layout.allocate(len(lengths) + 1, 64, dtype, DEVICE),
    )


def operands(
    rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, context: ForwardContext
) -> tuple[list[torch.Tensor], RotaryTables, HeadNorms]:
    number, kv_heads, size, angles = sizes
    qkv = [poisoned(torch.randn(rows + 1, count, size).to(dtype)) for count in (number, kv_heads, kv_heads)]
    turns = torch.randn(rows + 1, angles)
    tables = RotaryTables(poisoned(turns.cos()), poisoned(turns.sin()), context)
    return qkv, tables, HeadNorms(*(poisoned(torch.randn(size).to(dtype)) for _ in range(2)), 1e-6, 1.0)


@pytest.mark.soak
@pytest.mark.parametrize(("sizes", "dtype", "normed"), all_in_turns(SIZES, DTYPES, (False, True)))
def test_one_launch_has_the_bits_of_a_launch_each(
    sizes: tuple[int, int, int, int], normed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(sizes[2])
    options = AttentionOptions(0, 0.3)
    for rows in ROWS:
        found = []
        for apart in (False, True):
            torch.manual_seed(rows)
            context = step(rows, KVLayout(1, sizes[1], sizes[2]), dtype)
            (q, k, v), tables, norms = operands(rows, sizes, dtype, context)
            if apart:
                if normed:
                    q, k = (
                        rms_norm(x, weight, norms.eps, norms.offset) for x, weight in zip((q, k), norms, strict=False)
                    )
                out = attention(rotate(q, tables), rotate(k, tables), v, context, options)
            else:
                out = attention_of_rotated(q, k, v, tables, options, norms=norms if normed else None)
            assert not out[rows:].any()
            found.append((out, context.pages[0][1:]))  # type: ignore[index]
        for one, other in zip(*found, strict=True):
            assert torch.equal(one.view(torch.int8), other.view(torch.int8)), "also in what nobody wrote"


def leaves(rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, context: ForwardContext) -> list[Any]:
    """Return operands of which all want a gradient, with sinks, and what else a call needs."""
    torch.manual_seed(rows)
    qkv, tables, norms = operands(rows, sizes, dtype, context)
    sinks = torch.randn(sizes[0]).to(DEVICE)
    parts = [part.detach().requires_grad_() for part in (*qkv, sinks, norms.queries, norms.keys)]
    return [parts, tables, HeadNorms(parts[4], parts[5], 1e-6, 1.0)]


@pytest.mark.soak
@pytest.mark.parametrize(("sizes", "dtype", "normed"), all_in_turns(SIZES, DTYPES, (False, True)))
def test_training_has_the_bits_of_a_launch_each_and_its_gradients_too(
    sizes: tuple[int, int, int, int], normed: bool, dtype: torch.dtype
) -> None:
    """Training has the bits of a launch each, gradients too, in a call whose last row is padding; its
    gradient is zero.
    """
    options, rows = AttentionOptions(0, 0.3), 7
    context = replace(step(rows, KVLayout(1, sizes[1], sizes[2]), dtype), pages=None)
    found = []
    for apart in (False, True):
        (q, k, v, sinks, *weights), tables, norms = leaves(rows, sizes, dtype, context)
        with launches() as names:
            if apart:
                turned = [q, k]
                if normed:
                    turned = [
                        rms_norm(x, weight, norms.eps, norms.offset) for x, weight in zip(turned, norms, strict=False)
                    ]
                out = attention(*(rotate(x, tables) for x in turned), v, context, options, sinks)
            else:
                out = attention_of_rotated(q, k, v, tables, options, sinks, norms if normed else None)
        turns = [name for name in names if name in ("_turn_and_write", "_norm_rows", "_rotate_token", "_write")]
        each = ["_norm_rows"] * (2 * normed) + ["_rotate_token"] * 2 + ["_write"]
        assert apart or turns[-1] == "_turn_and_write"
        assert not apart or turns == each
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
        given = (q, k, v, sinks, *(weights if normed else ()))
        gradients = torch.autograd.grad(out, given, upstream, retain_graph=True)
        again = torch.autograd.grad(out, given, upstream)
        assert all(map(torch.equal, gradients, again))
        assert not any(part[rows:].any() for part in (out, *gradients[:3]))
        found.append((out, *gradients))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_training_without_gradients_is_one_launch_too() -> None:
    context = replace(step(3, KVLayout(1, 1, 32), torch.float32), pages=None)
    (q, k, v), tables, norms = operands(3, SIZES[0], torch.float32, context)
    attention_of_rotated(q, k, v, tables, AttentionOptions(0, 1.0), norms=norms)  # compared
    with launches() as names:
        attention_of_rotated(q, k, v, tables, AttentionOptions(0, 1.0), norms=norms)
    assert [name for name in names if name.startswith("_")] == ["_turn_and_write", "_attend_items"]


def test_it_is_one_launch_where_the_bits_were_seen_to_be_equal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    context = step(3, KVLayout(1, 1, 32), torch.float32)
    (q, k, v), tables, norms = operands(3, SIZES[0], torch.float32, context)
    expected = [["_turn_and_write", "_attend_items"], ["_norm_rows"] * 2 + ["_rotate_token"] * 2 + ["_write"]]
    for equal, names in zip((True, False), expected, strict=True):
        monkeypatch.setattr(heads, "proved_equal", lambda given, equal=equal: equal)
        heads.joins.cache_clear()
        with launches() as launched:
            attention_of_rotated(q, k, v, tables, AttentionOptions(0, 1.0), norms=norms)
        assert [name for name in launched if name.startswith("_")][: len(names)] == names
    [message] = caplog.messages
    assert "in one launch do not have the bits of a launch each" in message
    assert logging.WARNING in [record.levelno for record in caplog.records]


@pytest.mark.usefixtures("all_compared")
def test_another_rounding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that does not round between norm and rotation is seen."""
    given = heads.Heads(torch.device(DEVICE), torch.bfloat16, 3, 1, 32, 16, (torch.bfloat16,) * 2)
    assert heads.proved_equal(given)
    each = heads.turned_each

    def unrounded(q: torch.Tensor, k: torch.Tensor, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = each(q.float(), k.float(), *args)  # type: ignore[arg-type]
        return q.bfloat16(), k.bfloat16()

    monkeypatch.setattr(heads, "turned_each", unrounded)
    assert not heads.proved_equal(given)
