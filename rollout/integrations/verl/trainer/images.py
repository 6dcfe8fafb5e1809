"""Hand the images of a micro-batch to a bound model, and end a run whose ranks would wait for each other for ever.

A rank whose micro-batch has no image does not call the vision tower, whose weights another rank is gathering.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

_OF_VERL = "images_seqlens"
"""Names what verl works out of the grids for vision of its own."""


def with_images(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    """Return what a model that computes images takes of verl's inputs of a micro-batch.

    Raises:
        ValueError: some ranks have images in it and others have none.
    """
    own = int("pixel_values" in inputs)
    ranks = dist.get_world_size()
    if ranks > 1:
        count = torch.tensor(own, device=device)
        dist.all_reduce(count)
        if 0 < int(count) < ranks:
            raise ValueError(
                f"{int(count)} of {ranks} ranks of the trainer have images in a micro-batch, and would wait for the "
                "others, which have text alone, to gather the vision tower; allowed: images in the micro-batches of "
                "all ranks or of none (images in every prompt, or larger micro-batches), or one rank"
            )
    return {name: value for name, value in inputs.items() if name != _OF_VERL}
