"""Compute the log-probabilities of sampled tokens as trainers do: Hugging Face's, TRL's and samebit's."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from samebit.kernels import bind, token_logprobs

Scorer = Callable[[Tensor], Tensor]
"""Takes token ids ``[S, T]``; returns float32 log-probabilities ``[S, T - 1]`` of all but the first."""


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model for training, with Hugging Face's own choice of everything but SDPA."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def hugging_face(model: PreTrainedModel, micro_batch: int) -> Scorer:
    """Score with the module's forward and a log-softmax in float32."""

    def score(ids: Tensor) -> Tensor:
        logprobs = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[:, 1:, None])[..., 0]

    return _in_micro_batches(score, micro_batch)


def trl(model: PreTrainedModel, micro_batch: int) -> Scorer:
    """Score as TRL's GRPO does a module in bfloat16 with `bf16=True` or, if the module is in float32, `bf16=False`.

    That is the module's hidden states through the head that TRL puts on it: logits in the module's dtype, their
    log-softmax in float32. The module keeps that head.

    Raises:
        ImportError: TRL is not installed.
    """
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)
    mixed = model.dtype is torch.bfloat16

    def score(ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=mixed):
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
        found: Tensor = out.log_probs
        return found

    return _in_micro_batches(score, micro_batch)


def samebit(model: PreTrainedModel, micro_batch: int) -> Scorer:
    """Score with `token_logprobs` of the module, which is bound from here on."""
    bind(model)
    return _in_micro_batches(lambda ids: token_logprobs(model, ids), micro_batch)


def _in_micro_batches(score: Scorer, size: int) -> Scorer:
    @torch.no_grad()
    def scored(ids: Tensor) -> Tensor:
        return torch.cat([score(part) for part in ids.split(size)])

    return scored
