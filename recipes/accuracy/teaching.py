"""Teach a bound model by supervised steps, on the kernels that it generates with."""

import math
from collections.abc import Iterator
from itertools import islice

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from samebit.recipes.lessons import Rows
from samebit.recipes.warmup import supervised_loss

LEARNING_RATE = 3e-3
RAMP = 20


def teach(model: PreTrainedModel, batches: Iterator[Rows], steps: int) -> float:
    """Train `model` (bound) in place by AdamW, its rate falling like a cosine; return the last step's loss."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    last = float("nan")
    for step, batch in enumerate(bar := tqdm(islice(batches, steps), "teaching", total=steps, mininterval=1.0)):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * falling(step, steps)
        loss = supervised_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last = loss.item()
        bar.set_postfix(loss=f"{last:.3f}", refresh=False)
    return last


def falling(step: int, steps: int) -> float:
    """Return the share of the learning rate: ramped up, then falling to a twentieth."""
    return min(1.0, (step + 1) / RAMP) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
