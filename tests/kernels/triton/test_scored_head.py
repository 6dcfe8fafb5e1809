"""The head with its log-probabilities in Triton, made in parts, is near the oracle."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebit.kernels.binding.epilogue import Epilogue, soft_capped, unchanged
from samebit.kernels.binding.trainer import logprob_head as scored_head
from samebit.kernels.binding.trainer.logprob_head import scored
from samebit.kernels.binding.trainer.logprob_request import Scoring
from samebit.kernels.layout import device
from samebit.kernels.ops.linear import linear
from samebit.kernels.ops.logprobs import logprobs_from_logits
from samebit.kernels.triton import linear as triton_linear
from samebit.kernels.triton.tiles.proved_equal import tiles_of

from .. import reference
from ..helpers import assert_near
from .gpu import DEVICE, few, leaf

ROWS, WIDTH, VOCAB = 5, 36, 600
CONFIG = SimpleNamespace(final_logit_softcapping=3.0)


CASES = [
    (torch.float32, soft_capped),
    (torch.bfloat16, unchanged),
    (torch.float32, unchanged),
    (torch.float16, unchanged),
]


@pytest.mark.parametrize(("dtype", "epilogue"), few(CASES, 2))
def test_values_and_gradients_are_near_the_oracle(
    dtype: torch.dtype, epilogue: Epilogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(scored_head, "BYTES_AT_ONCE", 4 * VOCAB * 2)
    torch.manual_seed(0)
    tensors = [part.to(dtype) for part in (torch.randn(ROWS, WIDTH), torch.randn(VOCAB, WIDTH) / 4, torch.randn(VOCAB))]
    tokens, temperatures = torch.tensor([0, 255, 256, 511, 599]), torch.tensor([1.0, 0.7, 2.0, 1.0, 0.5])
    upstream = torch.randn(2, ROWS)
    mine, exact = [leaf(part) for part in tensors], [part.double().requires_grad_() for part in tensors]
    asked = Scoring(tokens.to(DEVICE), temperatures.to(DEVICE), with_entropy=True)
    scores = scored(*mine, epilogue, CONFIG, asked)
    (scores.log_probs @ upstream[0].to(DEVICE) + scores.entropy @ upstream[1].to(DEVICE)).backward()
    logits = epilogue(CONFIG, reference.linear(*exact))
    values, entropies = reference.logprobs(logits, tokens, temperatures), reference.entropy(logits, temperatures)
    (values @ upstream[0].double() + entropies @ upstream[1].double()).backward()
    if dtype == torch.float32:
        assert_near(scores.log_probs, values)
        assert_near(scores.entropy, entropies)
    for found, oracle in zip(mine, exact, strict=True):
        assert found.grad is not None
        assert oracle.grad is not None
        assert_near(found.grad, oracle.grad, 4)
    whole = epilogue(CONFIG, linear(*(part.to(DEVICE) for part in tensors)).float())
    assert torch.equal(scores.log_probs.detach(), logprobs_from_logits(whole, asked.token_ids, asked.temperatures))


def test_logits_are_computed_again_with_the_tiles_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are computed again with the tiles of the head, not with those of a layer with as few outputs as are
    computed at a time.
    """
    asked_for: list[int] = []

    def noted(tensor_device: torch.device, inputs: int, outputs: int, *layer: Any) -> Any:
        asked_for.append(outputs)
        return tiles_of(tensor_device, inputs, outputs, *layer)

    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(triton_linear, "tiles_of", noted)
    monkeypatch.setattr(scored_head, "BYTES_AT_ONCE", 4 * VOCAB * 2)
    x, weight = leaf(torch.randn(ROWS, WIDTH)), leaf(torch.randn(VOCAB, WIDTH))
    asked = Scoring(torch.zeros(ROWS, dtype=torch.int64, device=DEVICE), torch.ones(ROWS, device=DEVICE))
    scored(x, weight, None, unchanged, None, asked).log_probs.sum().backward()
    assert asked_for == [VOCAB] * (3 + 3), "three chunks of rows forward, three parts of the vocabulary back"
