"""Train the indexers of a GLM-5: by the KL divergence of their scores from what dense attention reads.

This is the first stage of DeepSeek-V3.2 (2025): attention reads all tokens, the model's own weights are fixed, and each
indexer learns the distribution that is the mean of the heads'. The model's loss gives an indexer no gradient.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb

from samebit.recipes.accuracy.teaching import falling
from samebit.recipes.lessons import Rows

LEARNING_RATE = 5e-3


def indexers(model: nn.Module) -> list[Any]:
    """Return the indexers, in the order of the layers."""
    return [module for name, module in model.named_modules() if name.endswith(".indexer")]


def teach_indexers(model: PreTrainedModel, batches: Iterator[Rows], steps: int) -> float:
    """Train the indexers of `model` in place; it is Hugging Face's own (not bound), and reads all tokens.

    Rows are right-padded, so that no token before the padding reads it. Returns the last step's loss, in nats.
    """
    modules = indexers(model)
    given: dict[int, tuple[Any, ...]] = {}
    handles = [
        one.register_forward_pre_hook(lambda _, args, number=number: given.update({number: args}))
        for number, one in enumerate(modules)
    ]
    parameters = [parameter for one in modules for parameter in one.parameters()]
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE, betas=(0.9, 0.98))
    last = float("nan")
    for step, batch in enumerate(bar := tqdm(islice(batches, steps), "indexers", total=steps, mininterval=1.0)):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * falling(step, steps)
        with torch.no_grad():
            read = model(batch.input_ids, use_cache=False, output_attentions=True).attentions
        real = batch.attention_mask.bool()
        parts = [divergence(one, given[number], read[number].mean(1), real) for number, one in enumerate(modules)]
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = loss.item()
        bar.set_postfix(loss=f"{last:.3f}", refresh=False)
    for handle in handles:
        handle.remove()
    return last


def divergence(indexer: Any, given: tuple[Any, ...], target: Tensor, real: Tensor) -> Tensor:
    """Return the mean divergence of a row's scores, behind a softmax, from `target` [B, T, T]; `real` [B, T]."""
    x, low_rank, (cos, sin) = given[:3]
    length = x.shape[1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    found = scores(indexer, x, low_rank, cos, sin).masked_fill(later, -1e9).log_softmax(-1)
    return kl_div(found[real], target[real], reduction="batchmean")


def scores(indexer: Any, x: Tensor, low_rank: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute the scores [B, T, T] that the indexer chooses by, with a gradient, as docs/sparse.md says."""
    rope = indexer.qk_rope_head_dim
    queries = indexer.wq_b(low_rank).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(x))[:, :, None]
    queries, keys = (
        torch.cat([apply_rotary_pos_emb(part[..., :rope], cos, sin, unsqueeze_dim=2), part[..., rope:]], -1)
        for part in (queries, keys)
    )
    weights = indexer.weights_proj(x) * indexer.n_heads**-0.5
    by_head = torch.einsum("bshd,btd->bsht", queries, keys[:, :, 0]) * indexer.softmax_scale
    return torch.einsum("bsht,bsh->bst", by_head.relu(), weights)
