"""A row has the same bits whether one program or many walk the splits of 512 keys of a long sequence.

In the interpreter as on a GPU, a row of a product is the same in any place of its tile.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.kernels.layout import attention_work, device
from samebit.kernels.layout.forward_context import training_context
from samebit.kernels.ops.attention import attention
from samebit.kernels.triton import attention as triton_attention

from ...campaign import long
from ..attention_layer import Shape, oracle, tensors
from ..helpers import assert_near, leaves
from ..shared_prefixes import Decode, Group
from .gpu import DEVICE, EVERY, leaf

pytestmark = pytest.mark.usefixtures("on_gpu")

CASES = max(1, int(os.environ.get("SAMEBIT_SOAK_CASES", "500")) // 25)
"""Is few, since one takes some seconds in the interpreter."""


@contextmanager
def limits(slots: int) -> Iterator[None]:
    """Split within so many kept softmaxes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_work, "SLOTS", slots)
        yield


def assert_one_row(decode: Decode, items: int | None = None) -> None:
    """Check that the newest rows have the same bits with as many splits of one program each as there can be, with few
    and none, in groups and apart, alone, as the last of three tokens, and in training. ``items``: those of the first
    launch.
    """
    (rows, context), last = decode.found(64, DEVICE), len(decode.lengths) - 1
    (walked,) = context.on_device.items_of.values()
    assert items in (None, len(walked.kept))
    assert_near(torch.cat(rows), torch.cat(decode.expected()), 4)
    for slots, shared in product((0, 3), (True, False)) if EVERY else ((0, True), (3, False)):
        with limits(slots):
            found, _ = decode.found(64, DEVICE, shared=shared)
            assert torch.equal(torch.cat(rows), torch.cat(found)), (slots, shared)
    assert torch.equal(torch.cat(rows), torch.cat(decode.found(64, DEVICE, shared=False)[0]))
    assert torch.equal(decode.found(64, DEVICE, only=last)[0][0], rows[last])
    assert torch.equal(decode.found(64, DEVICE, long=last)[0][last][-1:], rows[last])
    assert torch.equal(trained(decode, last)[-1:], rows[last])


def trained(decode: Decode, sequence: int) -> torch.Tensor:
    """Return the rows of all tokens of a sequence in a training call."""
    q, (k, v) = decode.queries[sequence], decode.cached[sequence]
    context = training_context((1, len(q)), None, None, DEVICE)
    sinks = None if decode.shape.sinks is None else decode.shape.sinks.to(DEVICE)
    parts = (x.to(DEVICE) for x in (q, k, v))
    return attention(*parts, context, decode.shape.options, sinks).cpu()


SEQUENCES = (
    (Shape(2, 1, 32, has_sinks=True), torch.float32, (Group(0, (511, 512, 1100, 1025, 514)),), 5),
    (Shape(6, 2, 50, softcap=5.0), torch.bfloat16, (Group(1100, (1110, 1600)), Group(0, (40,))), 3),
    (Shape(4, 4, 16, window=65, has_sinks=True), torch.float16, (Group(64, (65, 600)), Group(512, (513, 513))), 2),
)


@pytest.mark.parametrize(("shape", "dtype", "groups", "items"), SEQUENCES, ids=str)
def test_a_row_has_the_same_bits_however_its_splits_are_walked(
    shape: Shape, dtype: torch.dtype, groups: tuple[Group, ...], items: int
) -> None:
    assert_one_row(Decode(shape, dtype, groups), items)


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiled kernel holds its SPLIT; the interpreter reads it anew")
def test_splits_are_the_arithmetic_and_not_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """One softmax over all keys of a long sequence has other bits than merged splits: so the tests above see whether
    all ways merge.
    """
    decode = Decode(Shape(2, 1, 32), torch.float32, (Group(0, (512, 1500)),))
    monkeypatch.setattr(attention_work, "SLOTS", 0)
    short, longer = decode.found(64, DEVICE)[0]
    monkeypatch.setattr(triton_attention, "SPLIT", tl.constexpr(4096))
    found, other = decode.found(64, DEVICE)[0]
    assert torch.equal(short, found)
    assert not torch.equal(longer, other)


def test_gradients_of_a_sequence_of_two_splits_are_near_the_oracle() -> None:
    """Gradients of a sequence of two splits are near the oracle: they read the log-sum-exp of all keys, that of the
    merged splits.
    """
    shape, lengths = Shape(1, 1, 16, has_sinks=True), (530,)
    parts = tensors(shape, torch.float32, lengths)
    mine, exact = [leaf(x) for x in parts], leaves(*(x.double() for x in parts))
    sinks = shape.sinks
    assert sinks is not None
    out = attention(*mine, training_context((1, *lengths), None, None, DEVICE), shape.options, sinks.to(DEVICE))
    expected = oracle(*exact, shape, lengths, sinks.double())
    upstream = torch.randn(out.shape)
    out.backward(upstream.to(DEVICE))
    expected.backward(upstream.double())
    assert_near(out, expected, 4)
    for x, y in zip(mine, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert_near(x.grad, y.grad, 8)


@long
@settings(max_examples=CASES, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 7]), st.sampled_from([1, 2]), st.sampled_from([16, 31, 64, 129]),
    st.sampled_from([0, 1, 70, 513, 1500]), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(
        st.tuples(st.integers(0, 1300), st.lists(st.integers(1, 800), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
)  # fmt: skip
def test_any_sequences(
    group: int, kv_heads: int, size: int, window: int, has_sinks: bool, dtype: torch.dtype,
    groups: list[tuple[int, list[int]]],
) -> None:  # fmt: skip
    shape = Shape(group * kv_heads, kv_heads, size, window, has_sinks=has_sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "on_gpu", lambda tensor: True)
        assert_one_row(Decode(shape, dtype, tuple(Group(n, tuple(n + own + 2 for own in each)) for n, each in groups)))
