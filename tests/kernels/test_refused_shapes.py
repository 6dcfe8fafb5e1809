"""What would lead a kernel out of its memory, as it takes addresses, is refused before it starts, with both numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.kernels.layout.forward_context import ForwardContext, training_context
from samebit.kernels.layout.kv_pages import KVLayout
from samebit.kernels.layout.options import AttentionOptions, GatedNormOptions, SSMOptions
from samebit.kernels.layout.states.mamba import SSMShape
from samebit.kernels.layout.states.memory import StateLayout
from samebit.kernels.ops import sampling
from samebit.kernels.ops.activation import gated
from samebit.kernels.ops.attention import attention, attention_of_rotated
from samebit.kernels.ops.conv import causal_conv
from samebit.kernels.ops.linear import linear
from samebit.kernels.ops.logprobs import (
    entropies,
    entropy_from_logits,
    gather,
    gather_gradient,
    log_softmax,
    logprobs_from_logits,
)
from samebit.kernels.ops.norm import add_rms_norm, gated_rms_norm, layer_norm, rms_norm
from samebit.kernels.ops.rope import RotaryTables, rotate
from samebit.kernels.ops.ssd import scan

ROWS = 5
CONTEXT = training_context((1, ROWS), None, None)
OPTIONS = AttentionOptions(0, 1.0)
SSM = SSMOptions(0, 64, groups=2, state_size=3)
SHAPE = SSMShape(heads=4, head_dim=6, groups=2, state_size=3, taps=4)
WIDTH = SHAPE.conv_width


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(ROWS, *shape).to(dtype)


def tables(pairs: int, context: ForwardContext = CONTEXT) -> RotaryTables:
    return RotaryTables(torch.ones(context.num_rows, pairs), torch.zeros(context.num_rows, pairs), context)


def with_pages(kv_heads: int, head_dim: int) -> ForwardContext:
    pages = KVLayout(1, kv_heads, head_dim).allocate(1, 16, torch.float32)
    return replace(CONTEXT, pages=pages, block_size=16, block_tables=np.ones((1, 9), np.int32))


def with_states(slots: int, slot: int = 0) -> ForwardContext:
    states = StateLayout(1, SHAPE, 64).allocate(slots, torch.float32)
    return replace(
        CONTEXT, states=states, table_rows=np.array([slot], np.int32), block_tables=np.zeros((slot + 1, 9), np.int32)
    )


def laid_out(*lengths: int, context: ForwardContext = CONTEXT) -> ForwardContext:
    """Return a layout with sequences of these lengths, each from row 0 on."""
    nothing = np.zeros(len(lengths), np.int32)
    return replace(context, row_start=nothing, lengths=np.array(lengths, np.int32), starts=nothing, table_rows=nothing)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext = CONTEXT) -> torch.Tensor:
    return attention(q, k, v, context, OPTIONS)


def scanned(xbc: int, dt: int, heads: int, context: ForwardContext = CONTEXT, **options: int) -> torch.Tensor:
    of_heads = torch.ones(heads)
    return scan(rows(xbc), rows(dt), of_heads, of_heads, of_heads, context, replace(SSM, **options))


def drawn(**parts: torch.Tensor) -> torch.Tensor:
    given = {"logits": rows(9), "temperatures": rows(), "uniform": rows().double() / 2, **parts}
    return sampling.draw(**given)


def reduced(**parts: torch.Tensor) -> torch.Tensor:
    given = {"tokens": torch.zeros(ROWS, dtype=torch.int64), "temperatures": rows(), **parts}
    return gather_gradient(rows(9), **{name: rows() for name in ("peaks", "log_totals", "grad")}, **given)


def freed(*shape: int) -> torch.Tensor:
    """Return a parameter as FSDP and offloading leave it."""
    tensor = torch.ones(*shape)
    tensor.untyped_storage().resize_(0)
    return tensor


META = torch.ones(8, 8, device="meta")

GOOD: dict[str, Callable[[], Any]] = {
    "rotate": lambda: rotate(rows(2, 8), tables(4)),
    "rotate a part": lambda: rotate(rows(2, 9), tables(4)),
    "attend": lambda: attend(rows(4, 7), rows(2, 7), rows(2, 7)),
    "attend through pages": lambda: attend(rows(4, 7), rows(2, 7), rows(2, 7), with_pages(2, 7)),
    "attend to nothing": lambda: attend(rows(4, 7), rows(2, 7), rows(2, 7), laid_out(*[0] * ROWS)),
    "scan nothing": lambda: scanned(WIDTH, 4, 4, laid_out(*[0] * ROWS, context=with_states(3))),
    "scan": lambda: scanned(WIDTH, 4, 4),
    "scan with states": lambda: scanned(WIDTH, 4, 4, with_states(3, slot=2)),
    "convolution": lambda: causal_conv(rows(WIDTH), torch.ones(WIDTH, 1, 4), None, with_states(1), 0),
    "draw": drawn,
    "gradient": reduced,
}

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an odd head": (lambda: rotate(rows(2, 21), tables(11)), r"\[5, 2, 21\]; allowed .* D at least 22"),
    "more angles than a head": (lambda: rotate(rows(2, 6), tables(4)), r"\[5, 2, 6\]; allowed .* D at least 8"),
    "fewer rows than angles": (lambda: rotate(rows(2, 8)[:4], tables(4)), r"\[4, 2, 8\]; allowed with 5 rows"),
    "a rotation without heads": (lambda: rotate(rows(8), tables(4)), r"\[5, 8\]; allowed"),
    "a rotation in float64": (lambda: rotate(rows(2, 8).double(), tables(4)), "float64; allowed on the CPU"),
    "cos and sin": (lambda: RotaryTables(rows(4), rows(3), CONTEXT), r"sin has the shape \[5, 3\]; allowed: \[5, 4\]"),
    "angles of other rows": (lambda: RotaryTables(rows(4)[:2], rows(4)[:2], CONTEXT), r"\[2, 4\]; allowed: \[5, R\]"),
    "narrow angles": (lambda: RotaryTables(rows(4).bfloat16(), rows(4), CONTEXT), "cos is torch.bfloat16"),
    "an odd head on its way to the pages": (
        lambda: attention_of_rotated(
            rows(2, 21), rows(2, 21), rows(2, 21), tables(11, with_pages(2, 21)), OPTIONS
        ),
        r"q has the shape \[5, 2, 21\]; allowed .* D at least 22",
    ),
    "heads that share no keys": (lambda: attend(rows(4, 8), rows(3, 8), rows(3, 8)), "4 heads of 8.* 3 of 8"),
    "keys of another size": (lambda: attend(rows(4, 8), rows(2, 6), rows(2, 6)), "4 heads of 8.* 2 of 6"),
    "values of another size": (lambda: attend(rows(4, 8), rows(2, 8), rows(2, 6)), r"\[5, 2, 8\] and \[5, 2, 6\]"),
    "keys of another number": (lambda: attend(rows(4, 8), rows(2, 8), rows(1, 8)), r"\[5, 2, 8\] and \[5, 1, 8\]"),
    "no keys": (lambda: attend(rows(4, 8), rows(0, 8), rows(0, 8)), "0 of 8"),
    "flat queries": (lambda: attend(rows(32), rows(2, 8), rows(2, 8)), r"\[5, 32\]"),
    "rows beyond the context": (lambda: attend(*[torch.ones(6, 2, 8)] * 3), "the context has 5 rows"),
    "mixed dtypes": (lambda: attend(rows(4, 8).bfloat16(), rows(2, 8), rows(2, 8)), "bfloat16 and keys torch.float32"),
    "float64": (lambda: attend(*[rows(2, 8).double()] * 3), "float64; allowed on the CPU"),
    "sinks of other heads": (
        lambda: attention(rows(4, 8), rows(2, 8), rows(2, 8), CONTEXT, OPTIONS, torch.ones(2)),
        r"sinks, one a query head, has the shape \[2\]; allowed: \[4\]",
    ),
    "sinks in bfloat16": (
        lambda: attention(rows(4, 8), rows(2, 8), rows(2, 8), CONTEXT, OPTIONS, torch.ones(4).bfloat16()),
        "sinks is torch.bfloat16; allowed: torch.float32",
    ),
    "sinks elsewhere": (
        lambda: attention(rows(4, 8), rows(2, 8), rows(2, 8), CONTEXT, OPTIONS, torch.ones(4, device="meta")),
        "sinks is on meta",
    ),
    "pages of other heads": (
        lambda: attend(rows(2, 8), rows(2, 8), rows(2, 8), with_pages(1, 8)),
        r"KV memory has the shape \[2, 1, 2, 128\]; allowed: \[2, 2, 2, 128\]",
    ),
    "pages of other sizes": (
        lambda: attend(rows(2, 8), rows(2, 8), rows(2, 8), with_pages(2, 7)),
        r"\[2, 2, 2, 112\]; allowed: \[2, 2, 2, 128\]",
    ),
    "pages of other blocks": (
        lambda: attend(rows(2, 8), rows(2, 8), rows(2, 8), replace(with_pages(2, 8), block_size=32)),
        r"\[2, 2, 2, 128\]; allowed: \[2, 2, 2, 256\]",
    ),
    "a block that is not there": (
        lambda: attend(
            rows(2, 8), rows(2, 8), rows(2, 8),
            replace(with_pages(2, 8), block_tables=np.full((1, 9), 2, np.int32)),
        ),
        "block 2 is to be written; the layer has 2",
    ),
    "pages with gaps": (
        lambda: attend(
            rows(2, 8), rows(2, 8), rows(2, 8),
            replace(with_pages(2, 8), pages=(torch.ones(4, 2, 2, 128)[::2],)),
        ),
        "not contiguous",
    ),
    "a training call of other blocks": (
        lambda: attend(rows(2, 8), rows(2, 8), rows(2, 8), replace(CONTEXT, block_size=128)),
        "blocks of 128; allowed: 64",
    ),
    "a block size that is no power of two": (lambda: replace(CONTEXT, block_size=24), "24; allowed: a power of two"),
    "a length beyond the rows": (lambda: replace(CONTEXT, lengths=np.array([6], np.int32)), "within 5 rows"),
    "no length beside others": (lambda: laid_out(0, ROWS), "allowed: within 5 rows"),
    "a negative length": (lambda: laid_out(-1), "allowed: within 5 rows"),
    "a start before 0": (lambda: replace(CONTEXT, starts=np.array([-1], np.int32)), "allowed: 1 to 64, in 1 blocks"),
    "tokens beyond the table": (lambda: replace(CONTEXT, starts=np.array([60], np.int32)), r"\[65\] tokens; allowed"),
    "a table that is not there": (lambda: replace(CONTEXT, table_rows=np.array([1], np.int32)), "allowed: 0 to 0"),
    "parts of other lengths": (
        lambda: replace(CONTEXT, starts=np.zeros(2, np.int32)), r"\[\[1\], \[1\], \[2\], \[1\]\]; allowed: four alike"
    ),
    "gate and up": (lambda: gated("silu", rows(8), rows(4)), r"gate is \[5, 8\] and up \[5, 4\]"),
    "gate and up on the way of torch": (lambda: gated("gelu", rows(8), rows(1)), r"gate is \[5, 8\] and up \[5, 1\]"),
    "a gate in float64": (lambda: gated("silu", *[rows(8).double()] * 2), "float64; allowed on the CPU"),
    "a gate that is a number": (lambda: gated("silu", *[torch.tensor(1.0)] * 2), r"gate is \[\] and up \[\]"),
    "a norm's weight": (lambda: rms_norm(rows(8), torch.ones(7), 1e-6), r"weight has the shape \[7\]; allowed: \[8\]"),
    "the sum of a norm": (
        lambda: add_rms_norm(rows(8), rows(8), rows(7), torch.ones(8), 1e-6),
        r"total has the shape \[5, 7\]; allowed: \[5, 8\]",
    ),
    "a norm of a number": (lambda: rms_norm(torch.tensor(1.0), torch.ones(1), 1e-6), r"\[\]; allowed: \[..., W\]"),
    "a norm of nothing": (lambda: rms_norm(rows(0), torch.ones(0), 1e-6), r"\[5, 0\]; allowed: \[..., W\]"),
    "a norm in float16": (lambda: rms_norm(rows(8).half(), torch.ones(8).half(), 1e-6), "float16; allowed on the CPU"),
    "a norm's bias": (
        lambda: layer_norm(rows(8), torch.ones(8), torch.ones(9), 1e-6), r"bias has the shape \[9\]; allowed: \[8\]"
    ),
    "a gated norm's gate": (
        lambda: gated_rms_norm(rows(8), rows(6), torch.ones(8), GatedNormOptions(1e-6, 2, True)), r"gate \[5, 6\]"
    ),
    "a gated norm's groups": (
        lambda: gated_rms_norm(rows(8), rows(8), torch.ones(8), GatedNormOptions(1e-6, 3, True)), "in 3 groups"
    ),
    "a gated norm's dtypes": (
        lambda: gated_rms_norm(rows(8), rows(8).bfloat16(), torch.ones(8), GatedNormOptions(1e-6, 2, True)), "bfloat16"
    ),
    "a convolution's weight": (
        lambda: causal_conv(rows(8), torch.ones(7, 1, 4), None, CONTEXT, 0), r"\[7, 1, 4\]; allowed: \[8, 1, 4\]"
    ),
    "a convolution's bias": (
        lambda: causal_conv(rows(8), torch.ones(8, 1, 4), torch.ones(1), CONTEXT, 0), r"bias has the shape \[1\]"
    ),
    "a convolution's window": (
        lambda: causal_conv(rows(WIDTH), torch.ones(WIDTH, 1, 3), None, with_states(1), 0), "window has the shape"
    ),
    "a convolution's slot": (
        lambda: causal_conv(rows(WIDTH), torch.ones(WIDTH, 1, 4), None, with_states(2, slot=2), 0), "slot 2 is to be"
    ),
    "heads and groups": (lambda: scanned(WIDTH, 3, 3), "and dt 3; allowed: heads that the groups divide"),
    "x of other heads": (lambda: scanned(WIDTH + 1, 4, 4), f"xbc is {WIDTH + 1} wide, of which 12"),
    "no x": (lambda: scanned(12, 4, 4), "xbc is 12 wide, of which 12"),
    "decays of other heads": (lambda: scanned(WIDTH, 4, 3), r"decay_rate has the shape \[3\]; allowed: \[4\]"),
    "another state size": (lambda: scanned(WIDTH + 4, 4, 4, with_states(1), state_size=4), "state has the shape"),
    "a slot that is not there": (lambda: scanned(WIDTH, 4, 4, with_states(2, slot=2)), "slot 2 is to be read"),
    "a weight of three axes": (lambda: linear(rows(8), torch.ones(2, 3, 8)), r"weight \[2, 3, 8\].*; allowed"),
    "a product of a number": (lambda: linear(torch.tensor(1.0), torch.ones(2, 1)), "a single number"),
    "a weight without memory": (lambda: linear(rows(8), META), "weight is on meta.* the CPU"),
    "a bias without memory": (lambda: linear(rows(8), torch.ones(8, 8), META[0]), "bias is on meta.* the CPU"),
    "a weight whose memory was freed": (lambda: linear(rows(8), freed(8, 8)), r"\[8, 8\] and no memory"),
    "a norm whose memory was freed": (lambda: rms_norm(rows(8), freed(8), 1e-6), r"\[8\] and no memory"),
    "rows without memory": (lambda: linear(META, META), "on meta; there are kernels for cpu and cuda"),
    "a norm without memory": (lambda: rms_norm(rows(8), META[0], 1e-6), "weight is on meta"),
    "a gate without memory": (lambda: gated("silu", rows(8), META[:5]), "up is on meta"),
    "logits of three axes": (lambda: log_softmax(rows(2, 9), rows()), r"\[5, 2, 9\]; allowed: \[R, V\]"),
    "too few temperatures": (lambda: log_softmax(rows(9), rows()[:4]), r"temperatures has the shape \[4\]"),
    "too few tokens": (lambda: gather(rows(9), rows().long()[:3], rows()), r"tokens has the shape \[3\]"),
    "tokens of int32": (lambda: gather(rows(9), rows().int(), rows()), "tokens is torch.int32; allowed: torch.int64"),
    "logits in float16": (lambda: entropies(rows(9).half(), rows()), "logits is torch.float16; allowed: torch.float32"),
    "a gradient of other rows": (lambda: reduced(temperatures=rows()[:1]), r"temperatures has the shape \[1\]"),
    "logits of one axis": (lambda: drawn(logits=rows()), r"\[5\]; allowed: \[R, V\]"),
    "too few uniform numbers": (lambda: drawn(uniform=rows().double()[:2]), r"uniform has the shape \[2\]"),
    "narrow uniform numbers": (lambda: drawn(uniform=rows()), "uniform is torch.float32; allowed: torch.float64"),
    "logits in float64": (lambda: drawn(logits=rows(9).double()), "logits is torch.float64"),
    "keys of three words": (
        lambda: sampling.uniforms(torch.zeros(2, 3, dtype=torch.uint32), torch.zeros(2, 4, dtype=torch.uint32)),
        r"keys has the shape \[2, 3\]; allowed: \[2, 2\]",
    ),
    "counters of int64": (
        lambda: sampling.uniforms(torch.zeros(2, 2, dtype=torch.uint32), torch.zeros(2, 4, dtype=torch.int64)),
        "counters is torch.int64",
    ),
    "logits that are a number": (lambda: logprobs_from_logits(torch.tensor(1.0), torch.tensor(0)), "a single number"),
    "logits of whole numbers": (
        lambda: logprobs_from_logits(rows(9).long(), rows().long()), r"numbers, \[..., V\], got torch.int64"
    ),
    "logits of complex numbers": (lambda: logprobs_from_logits(rows(9) + 0j, rows().long()), "got torch.complex64"),
    "logits of NumPy's": (lambda: logprobs_from_logits(rows(9).numpy(), rows().long()), "got ndarray"),
    "logits in a list": (lambda: entropy_from_logits([[1.0, 2.0]]), "got list"),
    "logits without memory": (lambda: logprobs_from_logits(META, torch.zeros(8).long()), "logits is on the device 'm"),
    "sparse logits": (lambda: entropy_from_logits(rows(9).to_sparse()), "logits is torch.sparse_coo"),
    "no logits": (lambda: logprobs_from_logits(rows(0), rows().long()), r"\[5, 0\]; allowed: \[..., V\], V at least 1"),
    "ids of floats": (lambda: logprobs_from_logits(rows(9), rows()), "token_ids must be .* integers.* torch.float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_leads_out_of_memory_is_refused(name: str) -> None:
    call, says = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=says), torch.no_grad():
        call()


@pytest.mark.parametrize("name", GOOD)
def test_what_fits_is_computed(name: str) -> None:
    with torch.no_grad():
        found = GOOD[name]()
    assert bool(torch.isfinite(found.float()).all())


@settings(max_examples=30, deadline=None)
@given(x=st.integers(1, 40), pairs=st.integers(0, 22), heads=st.integers(1, 3))
def test_a_rotation_stays_in_its_heads(x: int, pairs: int, heads: int) -> None:
    given_x = torch.randn(ROWS, heads, x)
    try:
        found = rotate(given_x, tables(pairs))
    except ValueError:
        assert 2 * pairs > x
    else:
        assert 2 * pairs <= x
        assert torch.equal(found, given_x), "by an angle of 0"


def test_nothing_to_gate() -> None:
    for shape in ((0, 8), (3, 0), (2, 0, 8)):
        assert gated("silu", torch.ones(shape), torch.ones(shape)).shape == shape
