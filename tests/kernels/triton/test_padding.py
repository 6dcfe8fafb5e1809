"""Rows of no sequence, which a graph has room for, come out as zeros; clearing them is no launch of its own."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.kv_pages import KVLayout, LatentLayout, PageLayout, SparseLayout
from samebit.kernels.layout.options import AttentionOptions, DeltaOptions, LatentOptions, SSMOptions
from samebit.kernels.layout.states.delta import DeltaShape
from samebit.kernels.layout.states.mamba import SSMShape
from samebit.kernels.layout.states.memory import StateLayout
from samebit.kernels.ops.attention import attention
from samebit.kernels.ops.delta.rule import delta_rule
from samebit.kernels.ops.latent.attention import latent_attention
from samebit.kernels.ops.ssd import scan

from .gpu import DEVICE
from .launches import launches

pytestmark = pytest.mark.usefixtures("on_gpu")

ROOMY = 7
"""Is the number of rows of a step, more than it has sequences: two, which compute a token each, the rows 1 and 4."""

REAL = [1, 4]
MAMBA = SSMShape(heads=2, head_dim=20, groups=1, state_size=16, taps=2)
DELTA = DeltaShape(key_heads=1, value_heads=2, key_dim=16, value_dim=20, taps=2)


def step(pages: PageLayout | None = None, states: SSMShape | DeltaShape | None = None) -> ForwardContext:
    each = np.arange(2, dtype=np.int32)
    return ForwardContext(
        positions=torch.zeros(ROOMY, dtype=torch.int64, device=DEVICE),
        row_start=np.array(REAL, np.int32),
        lengths=np.ones(2, np.int32),
        starts=np.zeros(2, np.int32),
        table_rows=each,
        block_tables=1 + each[:, None],
        block_size=64,
        pages=None if pages is None else pages.allocate(3, 64, torch.float32, DEVICE),
        states=None if states is None else StateLayout(1, states, 64).allocate(2, torch.float32, 1, DEVICE),
    )


def rows(*shape: int) -> torch.Tensor:
    """Draw rows, of which those of no sequence are NaN."""
    made = torch.full((ROOMY, *shape), torch.nan)
    made[REAL] = torch.randn(2, *shape)
    return made.to(DEVICE)


Computation = Callable[[], torch.Tensor]


def attended() -> Computation:
    parts, context = (rows(4, 16), rows(2, 16), rows(2, 16)), step(KVLayout(1, 2, 16))
    return lambda: attention(*parts, context, AttentionOptions(0, 1.0))


def attended_to_latents() -> Computation:
    q, latents, context = rows(3, 40), rows(40), step(LatentLayout(1, 32, 8))
    return lambda: latent_attention(q, latents, context, LatentOptions(0, 1.0, 32, 8))


def attended_to_chosen() -> Computation:
    q, latents, context = rows(3, 40), rows(40), step(SparseLayout(32, 8, 16, (True,)))
    chosen = torch.zeros(ROOMY, 1, dtype=torch.int32, device=DEVICE)
    return lambda: latent_attention(q, latents, context, LatentOptions(0, 1.0, 32, 8), chosen)


def scanned() -> Computation:
    options = SSMOptions(0, 64, MAMBA.groups, MAMBA.state_size)
    of_rows, of_heads = (rows(MAMBA.conv_width), rows(2)), [torch.randn(2, device=DEVICE) for _ in range(3)]
    context = step(states=MAMBA)
    return lambda: scan(*of_rows, *of_heads, context, options)


def ruled() -> Computation:
    options = DeltaOptions(0, 64, DELTA.key_heads, DELTA.value_heads, DELTA.key_dim, DELTA.value_dim)
    of_rows, context = (rows(DELTA.conv_width), rows(2), rows(2)), step(states=DELTA)
    return lambda: delta_rule(*of_rows, context, options)


KERNELS = {
    attended: ["_write", "_attend_items"],
    attended_to_latents: ["_write", "_attend_items"],
    attended_to_chosen: ["_write", "_attend_chosen"],
    scanned: ["_scan_head", "_append_head"],
    ruled: ["_rule_head", "_append_tokens"],
}


@pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.__name__)
def test_rows_of_no_sequence_are_cleared_by_a_launch_that_runs_anyway(kind: Callable[[], Computation]) -> None:
    """A launch that runs anyway clears rows of no sequence, which `torch.empty` fills with NaN in these tests."""
    torch.manual_seed(0)
    compute = kind()
    with torch.no_grad(), launches() as names:
        out = compute()
    idle = [row for row in range(ROOMY) if row not in REAL]
    assert not out[idle].any(), "also no NaN"
    assert out[REAL].isfinite().all()
    assert out[REAL].any(dim=-1).all()
    assert [name for name in names if name.startswith("_")] == KERNELS[kind]
    assert [name for name in names if "zero" in name or "fill" in name] == []
