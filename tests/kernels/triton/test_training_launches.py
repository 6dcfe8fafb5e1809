"""A layer launches in training what it does in a rollout, and its gradients have the bits of those of a launch each."""

from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.residual import Addend
from samebit.kernels.layout import device
from samebit.kernels.triton import heads

from ...exactness.families import make_model
from .gpu import DEVICE
from .launches import launches

pytestmark = pytest.mark.usefixtures("on_gpu")

LAYER = Counter(
    {
        "_norm_sums": 2,
        "_multiply_layers": 1,
        "_multiply_gated": 1,
        "_multiply": 2,
        "_turn_and_write": 1,
        "_attend_items": 1,
    }
)
"""Counts the launches of a layer of Qwen3, in a call without padding."""

IDS = torch.tensor([[5, 6, 7]], device=DEVICE)


def qwen(layers: int) -> nn.Module:
    model = make_model("Qwen3", vocab_size=50, hidden_size=64, intermediate_size=100, num_hidden_layers=layers)
    return bind(model).to(DEVICE).train()


@cache
def compare() -> None:
    """Have what the layers of any `qwen` launch together compared with a launch each."""
    qwen(1).model(input_ids=IDS)


def forward(model: nn.Module) -> tuple[torch.Tensor, Counter[str]]:
    """Return hidden states, and what was launched."""
    with launches() as names:
        hidden = model.model(input_ids=IDS)[0]
    return hidden, Counter(names)


def test_a_layer_of_a_training_call_launches_so_many_kernels() -> None:
    compare()
    found = []
    for layers in (1, 2):
        hidden, names = forward(qwen(layers))
        assert hidden.requires_grad
        found.append(names)
    assert found[1] - found[0] == LAYER
    assert LAYER.total() == 8


@pytest.fixture(scope="module")
def of_a_launch_each() -> list[torch.Tensor]:
    """Return hidden states and gradients where nothing shares a launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "on_gpu", lambda tensor: True)
        compare()
        patch.setattr(Addend, "of", staticmethod(lambda x: x))
        patch.setattr(heads, "joins", lambda given: False)
        model = qwen(2)
        for module in model.modules():
            module.register_forward_hook(lambda module, given, out: None)
        return differentiated(model, apart=True)


def differentiated(model: nn.Module, *, apart: bool) -> list[torch.Tensor]:
    """Return hidden states, and the gradients of all parameters."""
    hidden, names = forward(model)
    for name in ("_norm_sums", "_turn_and_write", "_multiply_layers", "_multiply_gated"):
        assert bool(names[name]) != apart
    hidden.square().sum().backward()
    return [hidden, *(part.grad for part in model.model.parameters())]


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_its_gradients_have_the_bits_of_a_launch_each(
    reentrant: bool | None, of_a_launch_each: list[torch.Tensor]
) -> None:
    """Gradients have the bits of those of a launch each, whether layers are computed again in the backward or not."""
    model = qwen(2)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    for one, other in zip(differentiated(model, apart=False), of_a_launch_each, strict=True):
        assert torch.equal(one, other)


SUMS = {
    "NemotronH": ({"num_hidden_layers": 2, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 2}, 2),
    "Qwen3Moe": ({"num_hidden_layers": 1, "mlp_only_layers": []}, 2),
    "DeepseekV3": ({"num_hidden_layers": 1, "first_k_dense_replace": 0}, 2),
    "Qwen3_5": ({"num_hidden_layers": 1, "layer_types": ["linear_attention"]}, 2),
}
"""Names models with mixers, experts, latents and the delta rule, and how many sums have a norm behind them."""


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_other_layers_share_the_launch_of_their_norm(name: str) -> None:
    config, sums = SUMS[name]
    model = bind(make_model(name, vocab_size=50, hidden_size=64, intermediate_size=100, **config)).to(DEVICE)
    with torch.no_grad():
        model.model(input_ids=IDS)  # tiles are compared
        _, names = forward(model)
    assert names["_norm_sums"] == sums
