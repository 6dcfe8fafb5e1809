"""Make prompts with random images for a model, and score what follows them as trainers do."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from samebit.kernels import token_logprobs
from samebit.kernels.layout.images.image_layout import ImageLayout
from samebit.rollout.requests.prompt_with_images import PromptWithImages

SIZES = (((2, 3),), ((1, 1), (5, 4)), ((6, 7),), ((3, 1), (2, 2), (4, 2)), ((9, 12),))
"""Holds heights and widths, in tokens, of the images of each prompt; the last is longer than the grid of
recurrent layers' states."""

BEFORE, BEHIND = 5, 9
"""Count the tokens of text before each image, and behind the last."""


def prompts_with_images(layout: ImageLayout, vocab_size: int, longest: int, seed: int) -> list[PromptWithImages]:
    """Return prompts of at most so many tokens.

    Raises:
        ValueError: no prompt is so short.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    made = [_prompt(layout, vocab_size, sizes, rng, generator) for sizes in SIZES]
    short = [prompt for prompt in made if len(prompt.token_ids) <= longest]
    if not short:
        raise ValueError(f"no prompt with an image has at most {longest} tokens: ask for fewer --tokens")
    return short


def _prompt(
    layout: ImageLayout,
    vocab_size: int,
    sizes: tuple[tuple[int, int], ...],
    rng: random.Random,
    seeded: torch.Generator,
) -> PromptWithImages:
    def text(count: int) -> list[int]:
        drawn = (rng.randrange(vocab_size - 1) for _ in range(count))
        return [token + (token >= layout.token_id) for token in drawn]  # any but the placeholder

    ids = [token for height, width in sizes for token in [*text(BEFORE), *[layout.token_id] * (height * width)]]
    grids = torch.tensor([(1, height * layout.merge, width * layout.merge) for height, width in sizes])
    pixels = torch.randn(int(grids.prod(1).sum()), layout.patch_width, generator=seeded)
    return PromptWithImages([*ids, *text(BEHIND)], pixels, grids)


Scored = list[tuple[PromptWithImages, list[int]]]
"""Lists prompts and the tokens behind them that are scored."""


def alone(model: nn.Module, scored: Scored, layout: ImageLayout) -> list[torch.Tensor]:
    """Score each sequence in a forward of its own."""
    return [batch(model, [one], layout)[0] for one in scored]


def batch(model: nn.Module, scored: Scored, layout: ImageLayout) -> list[torch.Tensor]:
    """Score a rectangle with the sequences at its right edge; a placeholder that was sampled is text."""
    inputs = _inputs(scored, layout)
    scores = token_logprobs(model, inputs.pop("input_ids"), **inputs).detach()
    return [row[-len(new) :].cpu() for row, (_, new) in zip(scores, scored, strict=True)]


@torch.no_grad()
def of_transformers(module: Any, scored: Scored, layout: ImageLayout) -> list[torch.Tensor]:
    """Score each sequence in a forward of a module that is not bound: transformers' own, and torch's log-softmax."""
    found = []
    for prompt, new in scored:
        inputs = _inputs([(prompt, new)], layout)
        inputs["pixel_values"] = inputs["pixel_values"].to(module.dtype)
        logits = module(use_cache=False, **inputs).logits[0, -len(new) - 1 : -1]
        found.append(logits.float().log_softmax(-1).gather(1, torch.tensor(new)[:, None])[:, 0])
    return found


def _inputs(scored: Scored, layout: ImageLayout) -> dict[str, torch.Tensor]:
    """Return what a model with images is given of these sequences."""
    width = max(len(prompt.token_ids) + len(new) for prompt, new in scored)
    ids = torch.zeros(len(scored), width, dtype=torch.int64)
    mask, kinds = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (prompt, new) in enumerate(scored):
        own = torch.tensor(prompt.token_ids)
        start = width - len(own) - len(new)
        ids[row, start:] = torch.tensor([*prompt.token_ids, *new])
        mask[row, start:] = 1
        kinds[row, start : start + len(own)] = own == layout.token_id
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": kinds,
        "pixel_values": torch.cat([prompt.pixel_values for prompt, _ in scored]),
        "image_grid_thw": torch.cat([prompt.image_grid_thw for prompt, _ in scored]),
    }
