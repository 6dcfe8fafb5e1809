"""Gradients of the delta rule in Triton are near the float64 oracle, of each sequence alone, the same each time."""

from dataclasses import replace

import pytest
import torch

from samebit.kernels.layout.forward_context import ForwardContext, training_context
from samebit.kernels.layout.options import DeltaOptions
from samebit.kernels.ops.delta.rule import delta_rule

from .. import reference
from ..helpers import assert_near
from ..routes import packed_context
from .gpu import DEVICE, poisoned

pytestmark = pytest.mark.usefixtures("on_gpu")

LENGTHS = (1, 66, 17)
"""Lists sequences of one token, and of two chunks of the gradients."""

CASES = (
    (DeltaOptions(0, 64, key_heads=1, value_heads=2, key_dim=20, value_dim=40), torch.float32),
    (DeltaOptions(0, 64, key_heads=1, value_heads=1, key_dim=16, value_dim=7), torch.bfloat16),
)


def given(options: DeltaOptions, dtype: torch.dtype) -> list[torch.Tensor]:
    """Draw qkv, decay, beta and the upstream gradient; some tokens forget everything, some write nothing."""
    torch.manual_seed(0)
    rows = sum(LENGTHS)
    decay, beta = -torch.rand(rows, options.value_heads), 2 * torch.rand(rows, options.value_heads)
    decay[40], beta[50] = -200.0, 0.0
    return [torch.randn(rows, options.width).to(dtype), decay, beta, torch.randn(rows, options.inner).to(dtype)]


def context_of(lengths: tuple[int, ...]) -> ForwardContext:
    context = packed_context(lengths)
    return replace(context, positions=context.positions.to(DEVICE))


def found(options: DeltaOptions, inputs: list[torch.Tensor], context: ForwardContext) -> list[torch.Tensor]:
    leaves = [part.to(DEVICE, copy=True).requires_grad_() for part in inputs[:-1]]
    out = delta_rule(*leaves, context, options)
    return [part.cpu() for part in torch.autograd.grad(out, leaves, inputs[-1].to(DEVICE))]


@pytest.mark.parametrize(("options", "dtype"), CASES, ids=str)
def test_gradients_are_near_the_oracle_and_a_sequence_has_its_own(options: DeltaOptions, dtype: torch.dtype) -> None:
    inputs = given(options, dtype)
    mine = found(options, inputs, context_of(LENGTHS))
    *leaves, upstream = [part.double().requires_grad_() for part in inputs]
    keys = options.key_heads * options.key_dim
    out, begin = [], 0
    for length in LENGTHS:
        qkv, decay, beta = (part[begin : begin + length] for part in leaves)
        counts = (options.key_heads, options.key_heads, options.value_heads)
        parts = zip(qkv.split([keys, keys, options.inner], -1), counts, strict=True)
        q, k, v = (part.unflatten(-1, (n, -1)) for part, n in parts)
        out.append(reference.delta_rule(q, k, v, decay, beta).flatten(1))
        begin += length
    for one, other in zip(mine, torch.autograd.grad(torch.cat(out), leaves, upstream), strict=True):
        assert_near(one, other, 16)
    last = LENGTHS[-1]
    for one, other in zip(found(options, [part[-last:] for part in inputs], context_of((last,))), mine, strict=True):
        assert torch.equal(one, other[-last:])


def test_padding_rows_reach_no_gradient() -> None:
    options, dtype = CASES[1]
    lengths = LENGTHS[::2]
    inputs = [part[-sum(lengths) :] for part in given(options, dtype)]
    mask = torch.zeros(len(lengths), max(lengths) + 2, dtype=torch.int64)
    width = mask.shape[1]
    for s, length in enumerate(lengths):
        start = width - length if s % 2 == 0 else 0
        mask[s, start : start + length] = 1
    real = mask.flatten().bool()

    def spread(part: torch.Tensor) -> torch.Tensor:
        whole = part.new_full((len(real), *part.shape[1:]), torch.nan)
        whole[real] = part
        return poisoned(whole)

    context = training_context(mask.shape, mask, None, DEVICE)
    padded = found(options, [spread(part) for part in inputs], context)
    for one, other in zip(padded, found(options, inputs, context_of(lengths)), strict=True):
        assert torch.equal(one[real], other)
        assert not one[~real].any()
