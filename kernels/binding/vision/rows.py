"""Find the tokens of images among those of a call, and check what a caller gives as images.

Invariants:

* Images stand in the order of the tokens, sequence after sequence, and each has as many tokens as its grid says.
* A placeholder is a token of an image, unless the caller says which tokens are (``mm_token_type_ids``): one that was
  sampled is text.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout.call_rows import CallRows
from samebit.kernels.layout.images.image_layout import Grid, ImageLayout
from samebit.kernels.layout.images.image_rows import ImageRows
from samebit.kernels.layout.shape_checks import check_readable

Bools = npt.NDArray[np.bool_]


def grids_of(image_grid_thw: object, layout: ImageLayout) -> list[Grid]:
    """Return the grids of images as numbers.

    Raises:
        TypeError: no tensor of integers.
        ValueError: another shape than ``[images, 3]``, or a grid that is that of no image.
    """
    allowed = "a tensor of integers [images, 3], the patches of each image in time, height and width"
    if not isinstance(image_grid_thw, torch.Tensor):
        raise TypeError(f"image_grid_thw must be {allowed}, got {type(image_grid_thw).__name__}")
    if image_grid_thw.is_floating_point() or image_grid_thw.is_complex() or image_grid_thw.dtype is torch.bool:
        raise TypeError(f"image_grid_thw must be {allowed}, got {image_grid_thw.dtype}")
    check_readable("image_grid_thw", image_grid_thw)
    if image_grid_thw.dim() != 2 or image_grid_thw.shape[1] != 3:
        raise ValueError(f"image_grid_thw must be {allowed}, got the shape {list(image_grid_thw.shape)}")
    if not len(image_grid_thw):
        raise ValueError(f"image_grid_thw must be {allowed}, got none; allowed without images: no pixel_values either")
    grids = [(int(time), int(height), int(width)) for time, height, width in image_grid_thw.tolist()]
    for time, height, width in grids:
        if time != 1 or height < 1 or width < 1 or height % layout.merge or width % layout.merge:
            raise ValueError(
                f"image_grid_thw has {[time, height, width]}; allowed: [1, height, width], both positive multiples of "
                f"{layout.merge}: images alone are exact, not videos"
            )
    return grids


def check_pixels(pixel_values: object, grids: Sequence[Grid], layout: ImageLayout) -> torch.Tensor:
    """Return the patches of images, if they are those of these grids.

    Raises:
        TypeError: no tensor of real numbers.
        ValueError: another shape than the grids say.
    """
    count = sum(height * width for _, height, width in grids)
    allowed = f"a tensor of floating-point numbers [{count}, {layout.patch_width}], the patches of {len(grids)} images"
    if not isinstance(pixel_values, torch.Tensor):
        raise TypeError(f"pixel_values must be {allowed}, got {type(pixel_values).__name__}")
    if not pixel_values.is_floating_point() or pixel_values.layout is not torch.strided:
        raise TypeError(f"pixel_values must be {allowed}, got {pixel_values.dtype}, {pixel_values.layout}")
    if tuple(pixel_values.shape) != (count, layout.patch_width):
        raise ValueError(f"pixel_values must be {allowed}, got the shape {list(pixel_values.shape)}")
    return pixel_values


def tokens_of_images(ids: torch.Tensor, kinds: object, layout: ImageLayout) -> Bools:
    """Return which tokens ``[T]`` are those of images.

    Args:
        ids: ``[..., T]`` token ids.
        kinds: of their shape, 1 for a token of an image, 0 for text (``mm_token_type_ids``); None to go by the ids.
        layout: of the model's images.

    Raises:
        TypeError: kinds that are no tensor.
        ValueError: kinds of another shape, of videos, or of tokens that are no placeholders.
    """
    placeholders: Bools = (ids == layout.token_id).reshape(-1).cpu().numpy()
    if kinds is None:
        return placeholders
    if not isinstance(kinds, torch.Tensor):
        raise TypeError(f"mm_token_type_ids must be a tensor of the shape of input_ids, got {type(kinds).__name__}")
    if kinds.shape != ids.shape:
        raise ValueError(
            f"mm_token_type_ids must have the shape of input_ids, {list(ids.shape)}, got {list(kinds.shape)}"
        )
    given: Bools = (kinds != 0).reshape(-1).cpu().numpy()
    if bool((kinds > 1).any()) or bool((given & ~placeholders).any()):
        raise ValueError(
            f"mm_token_type_ids marks others than tokens of images, whose id is {layout.token_id}, with 1: videos are "
            "not exact"
        )
    return given


def rows_of_images(of_images: Bools, call: CallRows, grids: Sequence[Grid], layout: ImageLayout) -> ImageRows:
    """Return which rows of a call are those of images, and what rotates all rows.

    Args:
        of_images: ``[T]``, which rows hold a token of an image.
        call: where its sequences lie; each begins at its first token.
        grids: of the images, in the order of the rows.
        layout: of the model's images.

    Raises:
        ValueError: a sequence whose tokens of images are not those of the next images.
    """
    positions = np.zeros((3, call.num_rows), np.int64)
    counts = [layout.count(grid) for grid in grids]
    first = 0
    for sequence, (start, length) in enumerate(zip(call.row_start.tolist(), call.lengths.tolist(), strict=True)):
        marked = of_images[start : start + length]
        count, last = int(marked.sum()), first
        while count > 0 and last < len(grids):
            count, last = count - counts[last], last + 1
        if count:
            raise _of_other_images(sequence, int(marked.sum()), counts, first, layout)
        positions[:, start : start + length] = layout.rotary_positions(marked, grids[first:last])
        first = last
    if first < len(grids):
        raise ValueError(f"image_grid_thw has {len(grids)} images; the tokens are those of the first {first} alone")
    return ImageRows(torch.from_numpy(positions), torch.from_numpy(np.flatnonzero(of_images & _in_sequences(call))))


def _in_sequences(call: CallRows) -> Bools:
    """Return which rows belong to a sequence."""
    inside: Bools = np.zeros(call.num_rows, np.bool_)
    _, _, rows = call.computed
    inside[rows] = True
    return inside


def _of_other_images(sequence: int, count: int, counts: Sequence[int], first: int, layout: ImageLayout) -> ValueError:
    """Return the error of a sequence whose tokens of images are of no whole images."""
    return ValueError(
        f"sequence {sequence} of the call has {count} tokens of images ({layout.token_id}); allowed: those of the next "
        f"images, which have {counts[first:]} by image_grid_thw, or none. A placeholder that was sampled is text: say "
        "so by mm_token_type_ids, 1 for tokens of images and 0 for others"
    )


def check_rotary_positions(given: torch.Tensor | None, images: ImageRows, call: CallRows) -> None:
    """Check that positions which a caller gives three or four times are those that rotate.

    Args:
        given: ``[3, B, T]``, or ``[4, B, T]`` behind those of text; anything else is not looked at.
        images: of the call.
        call: where its sequences lie.

    Raises:
        ValueError: they are others.
    """
    if not isinstance(given, torch.Tensor) or given.dim() != 3 or len(given) not in (3, 4):
        return
    inside = torch.from_numpy(_in_sequences(call))
    own = given[-3:].reshape(3, -1).cpu().long()
    if own.shape != images.rotary_positions.shape or bool((own != images.rotary_positions)[:, inside].any()):
        raise ValueError(
            f"position_ids of the shape {list(given.shape)} are not those of these tokens and images (get_rope_index), "
            "which a rollout has; allowed: those, or none given"
        )


def text_positions(given: torch.Tensor | None) -> torch.Tensor | None:
    """Return the positions that say where sequences begin, of positions with images: the first of four; None of three,
    which do not say it; others as they are."""
    if not isinstance(given, torch.Tensor) or given.dim() != 3:
        return given
    return given[0] if len(given) == 4 else None
