"""The Kimi Delta Attention layer of Kimi-Linear, whose attention layers are not bound: near Hugging Face's, and the
same bits by any route through the states."""

from types import MethodType

import numpy as np
import pytest
import torch
from torch import nn

from samebit.kernels.binding.delta.family import KIMI
from samebit.kernels.binding.delta.plan import DeltaPlan
from samebit.kernels.binding.families import BindingError
from samebit.kernels.binding.modules import attach
from samebit.kernels.layout.forward_context import use_context
from samebit.kernels.ops.linear import linear

from ..kernels.mamba_layer import step_context
from ..kernels.routes import packed_context
from .families import DTYPES

kimi_linear = pytest.importorskip("transformers.models.kimi_linear", reason="transformers 5.23 has it")

LENGTHS = (1, 17, 50)


def made(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, DeltaPlan]:
    """A layer, and the plan of its family."""
    config = kimi_linear.KimiLinearConfig(
        vocab_size=30, hidden_size=50, linear_num_heads=2, linear_head_dim=20, linear_conv_kernel_dim=3,
        num_hidden_layers=2, num_local_experts=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = kimi_linear.modeling_kimi_linear.KimiLinearDeltaAttention(config, 0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.to(dtype), DeltaPlan("KimiLinear", KIMI, config, 16)


def bound(dtype: torch.dtype) -> tuple[nn.Module, DeltaPlan]:
    layer, plan = made(dtype)
    for part in layer.modules():
        if isinstance(part, nn.Linear):
            part.__dict__["forward"] = MethodType(lambda self, x: linear(x, self.weight, None), part)
    attach(layer, *plan.mixer("layer", layer))
    return layer, plan


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_near_hugging_face_and_the_same_bits_by_steps(dtype: torch.dtype) -> None:
    layer, plan = bound(dtype)
    theirs, _ = made(dtype)
    x = torch.randn(1, sum(LENGTHS), 50).to(dtype)
    with use_context(packed_context(LENGTHS)):
        trained = layer(x)
    begins = np.cumsum((0, *LENGTHS))
    expected = torch.cat([theirs.float()(part.float()) for part in x.split(LENGTHS, 1)], 1)
    error = (trained - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < {torch.float32: 2e-6, torch.bfloat16: 0.02}[dtype]
    layout = plan.state_layout()
    assert layout is not None
    states = layout.allocate(len(LENGTHS), dtype)
    done = [0] * len(LENGTHS)
    while done != list(LENGTHS):
        running = [s for s, length in enumerate(LENGTHS) if done[s] < length]
        counts = [min(1 if s % 2 else 7, LENGTHS[s] - done[s]) for s in running]
        rows = np.concatenate([begins[s] + done[s] + np.arange(n) for s, n in zip(running, counts, strict=True)])
        context = step_context(counts, [done[s] for s in running], running, states, block_size=16)
        with use_context(context):
            assert torch.equal(layer(x[:, rows]), trained[:, rows])
        for s, count in zip(running, counts, strict=True):
            done[s] += count


def test_gradients_are_as_near_float64_as_hugging_faces() -> None:
    layer, _ = bound(torch.float32)
    theirs, exact = made()[0], made()[0].double()
    x, upstream = torch.randn(2, 1, 50, 50)
    with use_context(packed_context((50,))):
        layer(x).backward(upstream)
    theirs(x).backward(upstream)
    exact(x.double()).backward(upstream.double())
    for (name, mine), other, oracle in zip(
        layer.named_parameters(), theirs.parameters(), exact.parameters(), strict=True
    ):
        of_mine, of_theirs = ((one.grad - oracle.grad).norm() / oracle.grad.norm() for one in (mine, other))
        assert of_mine < max(1e-5, of_theirs), name


def test_another_gate_in_its_norm_is_refused() -> None:
    layer, plan = made()
    layer.o_norm.activation = "silu"
    with pytest.raises(BindingError, match=r"o_norm has the gate 'silu' \(exact: sigmoid\)"):
        plan.mixer("layer", layer)
