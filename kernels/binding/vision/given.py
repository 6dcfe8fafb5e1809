"""Hold the images that a caller gives beside token ids."""

from dataclasses import dataclass

import torch

from samebit.kernels.binding.vision.rows import (
    check_pixels,
    check_rotary_positions,
    grids_of,
    rows_of_images,
    tokens_of_images,
)
from samebit.kernels.layout.call_rows import CallRows
from samebit.kernels.layout.images.image_layout import Grid, ImageLayout
from samebit.kernels.layout.images.image_rows import ImageRows


@dataclass(frozen=True, eq=False)
class GivenImages:
    """Holds images as Hugging Face's processor gives them, checked but for the tokens that they stand for.

    Attributes:
        layout: what the model takes images as.
        pixel_values: ``[patches, width]``.
        image_grid_thw: ``[images, 3]``.
        grids: the same as numbers.
        kinds: ``[B, T]``, 1 for the tokens of images (``mm_token_type_ids``); None to go by the ids.
    """

    layout: ImageLayout
    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor
    grids: list[Grid]
    kinds: torch.Tensor | None

    @classmethod
    def of(
        cls,
        layout: ImageLayout | None,
        pixel_values: torch.Tensor | None,
        image_grid_thw: torch.Tensor | None,
        kinds: torch.Tensor | None,
        why_none: str = "",
    ) -> "GivenImages | None":
        """Return what was given; None where that is text alone. ``why_none``: why there is no layout.

        Raises:
            TypeError: no tensors of the right numbers.
            ValueError: images for a model that computes text alone, a part of the arguments, shapes that do not fit.
        """
        if pixel_values is None and image_grid_thw is None:
            if isinstance(kinds, torch.Tensor) and bool(kinds.any()):
                raise ValueError("mm_token_type_ids marks tokens of images; allowed: with pixel_values, or zeros")
            return None
        if layout is None:
            raise ValueError(
                f"pixel_values: this model computes text alone{why_none}. Exact with images are whole models "
                "(...ForConditionalGeneration) of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, with and without experts"
            )
        if pixel_values is None or image_grid_thw is None:
            missing = "pixel_values" if pixel_values is None else "image_grid_thw"
            raise ValueError(f"images without {missing}; allowed: pixel_values and image_grid_thw, or neither")
        grids = grids_of(image_grid_thw, layout)
        return cls(layout, check_pixels(pixel_values, grids, layout), image_grid_thw.long(), grids, kinds)

    def alone(self) -> torch.Tensor:
        """Return token ids ``[1, N]`` of these images, and of a token behind them."""
        count = sum(map(self.layout.count, self.grids))
        return torch.tensor([[self.layout.token_id] * count + [0]], device="cpu")

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """Return what the model's forward gets of them beside the layout that says which rows they are."""
        return {"pixel_values": self.pixel_values, "image_grid_thw": self.image_grid_thw}

    def rows_of(self, ids: torch.Tensor, positions: torch.Tensor | None, call: CallRows) -> ImageRows:
        """Return which rows of a call they are, and what rotates its rows.

        Args:
            ids: ``[B, T]`` token ids.
            positions: that the caller gave; three or four of images are compared.
            call: where the sequences of these ids lie.

        Raises:
            ValueError: other images than those of the tokens, or other positions.
        """
        rows = rows_of_images(tokens_of_images(ids, self.kinds, self.layout), call, self.grids, self.layout)
        check_rotary_positions(positions, rows, call)
        return rows
