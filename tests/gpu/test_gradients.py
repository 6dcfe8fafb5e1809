"""Gradients have the same bits each time on a GPU, for each kind of layer.

A kernel that reads what nothing wrote has others: that the numbers are right is for `kernels/triton`, beside an oracle.
"""

import pytest
import torch
from transformers import PreTrainedModel

from samebit.kernels import bind, token_logprobs

from ..exactness.families import make_model, token_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

AGAIN = 4
NAMES = (
    "Qwen3", "Gemma3", "Qwen3Moe", "GptOss", "DeepseekV3", "NemotronH", "Bamba", "GraniteMoeHybrid", "FalconH1",
    "Zamba2", "Mamba2", "Qwen3Next", "Qwen3_5Moe", "OlmoHybrid",
)  # fmt: skip


def scored(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return log-probabilities, and the gradients of all parameters but the embedding's, which torch
    adds in any order.
    """
    embedded = model.get_input_embeddings().weight
    parameters = [part for part in model.parameters() if part.requires_grad and part is not embedded]
    scores = token_logprobs(model, ids)
    return [scores, *torch.autograd.grad(scores.sum(), parameters, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_same_each_time(name: str, dtype: torch.dtype) -> None:
    model, ids = bind(make_model(name, dtype)).cuda(), torch.tensor(token_ids(70, 70)).cuda()
    first = scored(model, ids)
    for _ in range(AGAIN):
        for one, other in zip(scored(model, ids), first, strict=True):
            assert torch.equal(one, other)
