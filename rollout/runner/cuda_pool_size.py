"""Measure how much of a GPU's memory the KV pool takes (`RolloutConfig.gpu_memory_utilization`)."""

from __future__ import annotations

import gc

import torch
from torch import nn

from samebit.kernels.binding.binding import binding_of
from samebit.kernels.layout.forward_context import training_context
from samebit.kernels.layout.memory_pool import empty_gpu_cache
from samebit.kernels.ops.logprobs import log_softmax
from samebit.rollout.engine.step_plan import most_scored
from samebit.rollout.runner.logits import logits_of


def kv_cache_bytes(model: nn.Module, share: float, num_tokens: int, num_drawn: int, other_bytes: int) -> int:
    """Return what is left for pages on the model's CUDA device when ``share`` of its memory may be in use.

    Args:
        model: bound, on the device.
        share: of the whole device's memory, all its users taken together.
        num_tokens: of the largest step, which is computed once to see what it needs.
        num_drawn: rows of it from which tokens are drawn, beside as many prompt tokens as a step scores at most.
        other_bytes: of what is allocated beside the pages: states of recurrent layers, the logits of graphs.
    """
    device = next(model.parameters()).device
    gc.collect()  # a bound model that nobody holds any more is a circle, and keeps its memory until then
    with torch.cuda.device(device):
        needed = _step_bytes(model, num_tokens, num_drawn, device)
        empty_gpu_cache()
        free, total = torch.cuda.mem_get_info(device)
    return left_for_pages(total, free, share, 2 * needed + other_bytes)  # twice: graphs keep theirs apart


def left_for_pages(total: int, free: int, share: float, reserved: int) -> int:
    """Return how many bytes the KV pool may take: ``share * total``, less what is in use (``total - free``) and
    ``reserved``; at least 0."""
    return max(0, int(share * total) - (total - free) - reserved)


@torch.no_grad()
def _step_bytes(model: nn.Module, num_tokens: int, num_drawn: int, device: torch.device) -> int:
    """Return the memory that a step of this many tokens takes at its height."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    context = training_context((1, num_tokens), None, None, device)
    most_rows = 2 * num_drawn + most_scored(binding_of(model).vocab_size)  # one scored of each that is admitted
    rows = torch.arange(min(num_tokens, most_rows), device=device)
    ones = torch.ones(len(rows), dtype=torch.float32, device=device)
    logits = logits_of(model, torch.zeros(num_tokens, dtype=torch.int64, device=device), rows, context)
    copies = logits[rows[:num_drawn]]  # as where several samples draw from one row
    log_softmax(copies, ones[:num_drawn])
    del copies
    log_softmax(logits, ones)  # as where the likely tokens of prompts are asked for
    return torch.cuda.max_memory_allocated(device) - before
