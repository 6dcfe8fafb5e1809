"""Build small models that compute images, and prompts with images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .families import VOCAB, cast, make_wrapped, token_ids

IMAGE = VOCAB - 1
"""The id of the placeholder."""

_QWEN2_5S = {"hidden_size": 120, "num_heads": 3, "depth": 3, "fullatt_block_indexes": [1], "window_size": 16}
_QWEN2S = {"embed_dim": 120, "num_heads": 3, "depth": 2, "mlp_ratio": 2, "hidden_size": 200}
_SIZES = {"intermediate_size": 100, "out_hidden_size": 200}
_PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN3S = {"hidden_size": 120, "num_heads": 3, "depth": 3, "num_position_embeddings": 64}
TOWERS: dict[str, dict[str, Any]] = {
    "Qwen2": {**_PATCHES, **_QWEN2_5S, **_SIZES},
    "Qwen2 in Qwen2VL": {**_PATCHES, **_QWEN2S},
    "Qwen3": {**_PATCHES, **_QWEN3S, **_SIZES, "deepstack_visual_indexes": [0, 2]},
    "Qwen3Moe": {**_PATCHES, **_QWEN3S, **_SIZES, "deepstack_visual_indexes": [1]},
    "Qwen3_5": {**_PATCHES, **_QWEN3S, **_SIZES},
    "Qwen3_5Moe": {**_PATCHES, **_QWEN3S, **_SIZES},
}
"""Holds, by family, the vision of a small model: heads of an odd size, windows, MLPs of odd widths."""


def make_model_with_images(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a new, unbound model with vision in evaluation mode; always the same weights."""
    model = make_wrapped(name, around={"vision_config": TOWERS[name], "image_token_id": IMAGE})
    return cast(model, dtype)


@dataclass(frozen=True, eq=False)
class WithImages:
    """Holds a sequence with images, as a processor gives it."""

    token_ids: list[int]
    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor

    @property
    def kinds(self) -> list[int]:
        """Return 1 for tokens of images, 0 for others."""
        return [int(token == IMAGE) for token in self.token_ids]


def with_images(sizes: Sequence[tuple[int, int]], seed: int, *, text: int = 5, ends: int = 9) -> WithImages:
    """Return a sequence of images of these heights and widths in patches, with text before each, and behind the last.

    Args:
        sizes: of the images, in patches; multiples of 2.
        seed: of pixels and text.
        text: count of its tokens before each image.
        ends: count of those behind the last.
    """
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    for number, (height, width) in enumerate(sizes):
        ids += [*_text(text, seed + number), *[IMAGE] * (height * width // 4)]
    ids += _text(ends, seed + len(sizes))
    patches = sum(height * width for height, width in sizes)
    grids = torch.tensor([(1, height, width) for height, width in sizes], dtype=torch.long).view(-1, 3)
    return WithImages(ids, torch.randn(patches, 3 * 2 * 4 * 4, generator=generator), grids)


def _text(count: int, seed: int) -> list[int]:
    return [min(token, IMAGE - 1) for token in token_ids(count, seed=seed)[0]]


def joined(sequences: Sequence[WithImages]) -> dict[str, torch.Tensor]:
    """Return ``pixel_values`` and ``image_grid_thw`` of several sequences, in their order."""
    return {
        "pixel_values": torch.cat([one.pixel_values for one in sequences]),
        "image_grid_thw": torch.cat([one.image_grid_thw for one in sequences]),
    }
