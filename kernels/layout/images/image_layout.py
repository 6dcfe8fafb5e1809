"""Say what a model takes images as, and where they stand among its tokens.

Invariants:

* A token of an image is the placeholder in a prompt; its embedding is a row of the image's features. A placeholder that
  was sampled is text.
* Positions that rotate (Qwen2-VL, `M-RoPE`: time, height, width) are others than those of keys: an image of ``h`` by
  ``w`` tokens moves what follows it by ``max(h, w)``, whatever the count of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class ImageLayout:
    """Says what a model takes images as.

    Attributes:
        token_id: the placeholder.
        merge: patches along an edge that become one token.
        patch_width: numbers of a patch, the columns of ``pixel_values``.
    """

    token_id: int
    merge: int
    patch_width: int

    def count(self, grid: Grid) -> int:
        """Return the tokens of an image of a grid (time, height, width) of patches."""
        time, height, width = grid
        return time * (height // self.merge) * (width // self.merge)

    def rotary_positions(self, of_images: npt.NDArray[np.bool_], grids: Sequence[Grid]) -> Longs:
        """Return what rotates each token of a sequence: ``[3, T]``, time, height and width.

        Args:
            of_images: ``[T]``, which tokens are those of images.
            grids: of the images, in their order; their tokens are as many as are marked.
        """
        places = np.flatnonzero(of_images)
        positions = np.zeros((3, len(of_images)), np.int64)
        step = np.ones(len(of_images), np.int64)  # how far each token moves those behind it
        step[places] = 0
        first = 0
        inside: list[Longs] = []
        for grid in grids:
            time, height, width = grid[0], grid[1] // self.merge, grid[2] // self.merge
            inside.append(np.indices((time, height, width)).reshape(3, -1))
            first += time * height * width
            step[places[first - 1]] = max(height, width)
        positions[:] = np.cumsum(step) - step
        if inside:
            begins = np.repeat(np.cumsum([0, *(part.shape[1] for part in inside)])[:-1], [p.shape[1] for p in inside])
            positions[:, places] = positions[:, places[begins]] + np.concatenate(inside, axis=1)
        return positions
