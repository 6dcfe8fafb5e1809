"""What a trainer hands over may lie on the host, and torch's defaults, which it may set, change no bit on a GPU."""

import pytest
import torch

from samebit.kernels import bind, token_logprobs
from samebit.kernels.binding.trainer.training import token_scores
from samebit.kernels.layout.forward_context import training_context
from samebit.kernels.layout.options import DeltaOptions
from samebit.kernels.ops.delta.rule import delta_rule

from ..exactness.families import make_model, token_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

IDS = torch.tensor(token_ids(40, 40))


def test_masks_and_temperatures_may_lie_on_the_host() -> None:
    model, ids = bind(make_model("Qwen3", torch.bfloat16)).cuda(), IDS.cuda()
    mask, wanted = torch.ones_like(IDS), torch.zeros(2, 39, dtype=torch.bool)
    mask[0, :7], wanted[:, 11:30] = 0, True
    temperatures = torch.rand(2, 39) + 0.5
    with torch.no_grad():
        one, other = (
            token_scores(
                model, ids, attention_mask=mask.to(device), temperature=temperatures.to(device),
                wanted=wanted.to(device), with_entropy=True,
            )
            for device in ("cpu", "cuda")
        )  # fmt: skip
    assert torch.equal(one["log_probs"], other["log_probs"])
    assert torch.equal(one["entropy"], other["entropy"])
    assert one["log_probs"].is_cuda
    assert bool((one["log_probs"][:, 11:30] != 0).all())


@pytest.mark.parametrize("name", ["FalconH1", "Qwen3Next", "Gemma3"])
def test_defaults_change_no_bit(name: str) -> None:
    model, ids = bind(make_model(name, torch.bfloat16)).cuda(), IDS.cuda()
    embedded = model.get_input_embeddings().weight  # whose gradient torch adds up, in any order
    parameters = [part for part in model.parameters() if part.requires_grad and part is not embedded]

    def scored() -> list[torch.Tensor]:
        scores = token_logprobs(model, ids)
        return [scores, *torch.autograd.grad(scores.sum(), parameters, allow_unused=True, materialize_grads=True)]

    expected = scored()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda")
    try:
        found = scored()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_gradients_by_channel_are_not_of_tf32() -> None:
    """Gradients by channel are torch's operations, in whose float32 products a trainer may turn TF32 on."""
    options, device = DeltaOptions(0, 64, 4, 4, 64, 64, by_channel=True), torch.device("cuda")
    context = training_context(tuple(IDS.shape), None, None, device)
    rows = IDS.numel()
    given = torch.randn(rows, options.width), -torch.rand(rows, options.decays), torch.rand(rows, 4)
    upstream = torch.randn(rows, options.inner, device=device)

    def gradients() -> list[torch.Tensor]:
        found = [part.to(device).requires_grad_() for part in given]
        return list(torch.autograd.grad(delta_rule(*found, context, options), found, upstream))

    before = torch.get_float32_matmul_precision()
    expected = gradients()
    torch.set_float32_matmul_precision("high")
    try:
        found = gradients()
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
