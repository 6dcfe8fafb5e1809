"""Hold what a call with images reads beside its tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class ImageRows:
    """Holds what the T rows of a call with images read beside their tokens.

    Attributes:
        rotary_positions: ``[3, T]`` int64, what rotates each row: time, height, width; of text three alike.
        rows: ``[K]`` int64, those whose embeddings are features.
        features: ``[K, (1 + L) * hidden]``, in the model's dtype: embeddings, and beside them what is added to the rows
            behind each of the first L layers (DeepStack); None where no row has any.
    """

    rotary_positions: torch.Tensor
    rows: torch.Tensor
    features: torch.Tensor | None = None

    def embeddings(self, width: int) -> torch.Tensor | None:
        """Return the embeddings ``[K, width]`` of the rows; None where no row has any."""
        return None if self.features is None else self.features[:, :width]

    def added(self, width: int) -> tuple[torch.Tensor, ...]:
        """Return what is added to the rows behind the first layers, ``[K, width]`` each."""
        return () if self.features is None else self.features.split(width, dim=1)[1:]

    def of_rows(self, kept: torch.Tensor) -> "ImageRows":
        """Return what these rows ``[K]`` of the call read, before their features are known; all of images are kept."""
        marked = torch.zeros(self.rotary_positions.shape[1], dtype=torch.bool, device="cpu")
        marked[self.rows] = True
        return ImageRows(self.rotary_positions[:, kept], marked[kept].nonzero().squeeze(1))
