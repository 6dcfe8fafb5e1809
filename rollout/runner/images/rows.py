"""Say which rows of a step stand for images, and what rotates its rows.

Invariants
----------
* A row's rotation depends on its sequence and its position there alone: on the prompt's images, or behind the prompt on
  what these have moved the position by. So do guessed rows, and those whose tokens are not known yet.
* An image whose features can not be computed fails its own sequences. Their rows are computed as text, and void.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout.images.image_layout import Longs
from samebit.kernels.layout.images.image_rows import ImageRows
from samebit.rollout.engine.failures import image_not_computed
from samebit.rollout.engine.step_plan import ScheduledSequence
from samebit.rollout.requests.images import PromptImages
from samebit.rollout.requests.request import Sequence
from samebit.rollout.runner.images.features import ImageFeatures

Failed = list[tuple[Sequence, Exception]]
"""Lists sequences that can not be computed, each with its error."""


def image_rows(
    items: list[ScheduledSequence], positions: npt.NDArray[np.int64], features: ImageFeatures
) -> tuple[ImageRows | None, Failed]:
    """Return what the rows of images read in a step, and what failed; None where no sequence of the step has any.

    positions: ``[T]``, of the rows, item after item.
    """
    found, failed = _Found(positions), Failed()
    first = 0
    for item in items:
        images = item.sequence.shared.images
        if images is not None:
            found.rotate(item, images, first)
            failed += found.take(item, images, first, features)
        first += item.length
    return found.rows(), failed


class _Found:
    """Gathers the rows of images of a step."""

    def __init__(self, positions: npt.NDArray[np.int64]) -> None:
        self._positions = positions
        self._rotary: Longs | None = None
        self._rows: list[npt.NDArray[np.int64]] = []
        self._features: list[torch.Tensor] = []

    def rotate(self, item: ScheduledSequence, images: PromptImages, first: int) -> None:
        """Set what rotates the rows of an item, of which `first` is the first one."""
        if self._rotary is None:
            self._rotary = np.repeat(self._positions[None], 3, axis=0)
        rotary = self._rotary[:, first : first + item.length]
        rotary += images.shift
        of_prompt = images.rotary_positions[:, item.start : item.start + item.length]
        rotary[:, : of_prompt.shape[1]] = of_prompt

    def take(self, item: ScheduledSequence, images: PromptImages, first: int, features: ImageFeatures) -> Failed:
        """Take the features of the item's rows; return the sequence and the error where they can not be computed."""
        end = item.start + item.length
        for image in images.images:
            begin, stop = max(image.start, item.start), min(image.start + image.count, end)
            if begin >= stop:
                continue
            try:
                of_image = features.of(image)
            except Exception as error:  # boundary: whatever the tower raises is of this image
                return [(item.sequence, image_not_computed(item.sequence, image, error))]
            self._rows.append(np.arange(first + begin - item.start, first + stop - item.start))
            self._features.append(of_image[begin - image.start : stop - image.start])
        return []

    def rows(self) -> ImageRows | None:
        """Return what was gathered; None where no sequence has images."""
        if self._rotary is None:
            return None
        return ImageRows(
            torch.from_numpy(self._rotary),
            torch.from_numpy(np.concatenate(self._rows) if self._rows else np.zeros(0, np.int64)),
            torch.cat(self._features) if self._features else None,
        )
