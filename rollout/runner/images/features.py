"""Compute the features of images when a step first needs them, and keep those that were needed last.

Invariants
----------
* What is kept is of the weights as they are: who changes them has it forgotten.
* An image's features depend on its pixels, its grid and the weights alone: found or computed, they have the same bits.
* What is kept takes at most `most_bytes`, but for the one that was needed last.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from samebit.kernels import image_features
from samebit.rollout.engine.step_plan import ImageCounters
from samebit.rollout.requests.images import PromptImage

MOST_BYTES = 1 << 28
"""Features are kept in a quarter of a GiB: those of 37 images of 1,000 tokens, 3,584 numbers each in bfloat16."""


class ImageFeatures:
    """Holds the features of images by their digests, for the chunks of a prompt and for prompts with equal images."""

    def __init__(self, model: nn.Module, most_bytes: int = MOST_BYTES) -> None:
        self.counters = ImageCounters()
        self._model = model
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._num_bytes = 0

    def of(self, image: PromptImage) -> torch.Tensor:
        """Return an image's features, ``[its tokens, hidden]``."""
        features = self._kept.get(image.digest)
        if features is not None:
            self._kept.move_to_end(image.digest)
            self.counters.found += 1
            return features
        features = image_features(self._model, image.pixels, torch.tensor([image.grid]))
        self.counters.computed += 1
        self._kept[image.digest] = features
        self._num_bytes += features.nbytes
        while self._num_bytes > self._most_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return features

    def forget(self) -> None:
        """Keep none: the weights change, or no request is left."""
        self._kept.clear()
        self._num_bytes = 0
