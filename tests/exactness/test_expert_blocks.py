"""Blocks of routed experts by themselves, as DeepSeek's, are exact in what groups and methods choose."""

from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from samebit.kernels import BindingError
from samebit.kernels.binding.attached import attach
from samebit.kernels.binding.families.known import FAMILIES
from samebit.kernels.binding.plan import Plan

from ..kernels.helpers import assert_near
from .families import DTYPES, cast
from .gradients import relative_error

ROWS = 37
SIZES = {
    "hidden_size": 100,
    "num_attention_heads": 2,
    "moe_intermediate_size": 36,
    "n_routed_experts": 15,
    "num_experts_per_tok": 4,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sigmoid": ("DeepseekV3", "MoE", {}),
    "sigmoid, not normalised": ("DeepseekV3", "MoE", {"norm_topk_prob": False}),
    "sigmoid, one group": ("DeepseekV3", "MoE", {"n_group": 1, "topk_group": 1}),
    "softmax, greedy": ("DeepseekV2", "Moe", {"topk_method": "greedy"}),
    "softmax, groups": ("DeepseekV2", "Moe", {"topk_method": "group_limited_greedy"}),
    "sigmoid, the block's correction": (
        "MiniMaxM2",
        "SparseMoeBlock",
        {"num_local_experts": 15, "intermediate_size": 36},
    ),
    "of a family that is bound as a whole": ("Glm4Moe", "MoE", {}),
}
KNOWN = {family.prefix: family for family in FAMILIES.values()}


def make_block(case: str, dtype: torch.dtype) -> Any:
    """Make a block that is not bound; always the same weights."""
    prefix, name, changes = CASES[case]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **changes})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block = getattr(
        import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}"), prefix + name
    )(config)
    block.config = config  # which some have already
    block.num_experts = config.n_routed_experts  # transformers 5.10's DeepSeek-V2 reads it and does not set it
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.normal_(std=0.2)
    return cast(block, dtype)


def bound(block: Any, prefix: str) -> nn.Module:
    plan = Plan(KNOWN[prefix], block.config, block, ssm_chunk=64, exact=True)
    planned = [(module, plan.attachment_of(name, module)) for name, module in block.named_modules(prefix="mlp")]
    for module, attached in planned:
        if attached is not None:
            attach(module, attached.forward, attached.facts)
    return block


def rows_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1, ROWS, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_near_hugging_face_and_a_row_knows_itself_alone(case: str, dtype: torch.dtype) -> None:
    x = rows_of(dtype)
    block = bound(make_block(case, dtype), CASES[case][0])
    with torch.no_grad():
        whole = block(x)
        assert_near(whole, make_block(case, dtype).double()(x.double()), 4)
        for count in (1, 2, 3, 7):
            pieces = torch.cat([block(piece) for piece in x.split(count, dim=1)], dim=1)
            assert torch.equal(pieces, whole), count
        assert torch.equal(block(x.flip(1)).flip(1), whole)
    assert torch.equal(block(x).detach(), whole)


@pytest.mark.parametrize("case", CASES)
def test_gradients_near_float64(case: str) -> None:
    mine, exact = bound(make_block(case, torch.float32), CASES[case][0]), make_block(case, torch.float32).double()
    upstream = torch.randn(rows_of(torch.float32).shape)
    found = {}
    for block in (mine, exact):
        x = rows_of(torch.float32).to(next(block.parameters()).dtype).requires_grad_()
        block(x).backward(upstream.to(x.dtype))
        found[block] = {"x": x.grad, **{name: tensor.grad for name, tensor in block.named_parameters()}}
    for name, grad in found[exact].items():
        assert relative_error(found[mine][name], grad) < 1e-5, name


def test_a_method_that_is_not_known() -> None:
    block = make_block("softmax, greedy", torch.float32)
    block.config.topk_method = "noaux"
    with pytest.raises(BindingError, match=r"DeepseekV2: topk_method='noaux' of mlp; allowed: 'greedy'"):
        bound(block, "DeepseekV2")
