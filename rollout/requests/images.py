"""Check the images of a prompt against the model that is to compute them, and hold them for the request.

Invariants
----------
* All placeholders of such a prompt are of its images, in their order: those of an image stand side by side, as many as
  it has tokens. One that was sampled behind the prompt is text.
* The pixels are a copy of the caller's, in their own dtype.
* Images of equal digests have equal pixels in an equal grid, wherever they stand.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout.images.image_layout import Grid, ImageLayout, Longs
from samebit.rollout.checks import shown
from samebit.rollout.errors import RequestError
from samebit.rollout.requests.prompt_with_images import PromptWithImages

_DIGEST_BYTES = 32
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False, slots=True)
class PromptImage:
    """Holds an image of a prompt.

    start, count: its tokens stand at the positions ``start .. start + count - 1``.
    grid, pixels: its patches, ``[patches, numbers of a patch]``. digest: names both.
    """

    start: int
    count: int
    grid: Grid
    pixels: torch.Tensor
    digest: bytes


@dataclass(frozen=True, eq=False, slots=True)
class PromptImages:
    """Holds the images of a prompt, in their order, and what rotates its tokens.

    rotary_positions: ``[3, T]``, of the prompt's T tokens.
    shift: what a token behind the prompt rotates by beside its position; 0 or less.
    """

    images: tuple[PromptImage, ...]
    rotary_positions: Longs
    shift: int

    def marks(self, block_size: int) -> dict[int, bytes]:
        """Return by the number of a block the digests of the images that begin in it."""
        found: dict[int, bytes] = {}
        for image in self.images:
            number = image.start // block_size
            found[number] = found.get(number, b"") + image.digest
        return found

    @property
    def digests(self) -> bytes:
        """Return the digests of all images."""
        return b"".join(image.digest for image in self.images)


@torch.inference_mode(False)  # what is copied is read in another thread, for another caller's gradients maybe
def checked_images(given: PromptWithImages, ids: npt.NDArray[np.int64], layout: ImageLayout) -> PromptImages:
    """Return the images of a prompt with these ids, for a model of this layout.

    Raises:
        RequestError: grids, pixels or placeholders that do not fit each other or the model.
    """
    grids = _grids(given.image_grid_thw, layout.merge)
    pixels = _pixels(given.pixel_values, sum(map(prod, grids)), layout.patch_width)
    of_images = ids == layout.token_id
    starts = _starts(of_images, grids, layout)
    parts = pixels.split([prod(grid) for grid in grids])
    images = tuple(
        PromptImage(start, layout.count(grid), grid, part, _digest(part, grid))
        for start, grid, part in zip(starts, grids, parts, strict=True)
    )
    rotary_positions = layout.rotary_positions(of_images, grids)
    return PromptImages(images, rotary_positions, int(rotary_positions.max()) + 1 - len(ids))


def _grids(given: object, merge: int) -> list[Grid]:
    if not isinstance(given, torch.Tensor) or given.dim() != 2 or given.shape[1] != 3 or not _has_ints(given):
        raise RequestError(f"image_grid_thw must be a tensor of integers [images, 3], got {_described(given)}")
    if not len(given):
        raise RequestError("image_grid_thw has no image; a prompt without images is a list of token ids")
    grids: list[Grid] = [(time, height, width) for time, height, width in given.tolist()]
    for number, grid in enumerate(grids):
        time, height, width = grid
        if time != 1 or height < 1 or width < 1 or height % merge or width % merge:
            raise RequestError(
                f"image_grid_thw[{number}] is {list(grid)}; allowed: a time of 1 (images, no videos), and height and "
                f"width positive multiples of {merge}"
            )
    return grids


def _pixels(given: object, patches: int, width: int) -> torch.Tensor:
    """Return a copy of the pixels of so many patches."""
    if not isinstance(given, torch.Tensor) or given.dtype not in _DTYPES or given.is_meta:
        raise RequestError(f"pixel_values must be a tensor of floats of 16, 32 or 64 bits, got {_described(given)}")
    if given.shape != (patches, width):
        raise RequestError(
            f"pixel_values has the shape {list(given.shape)}; allowed: {[patches, width]}, the patches that "
            "image_grid_thw counts, with the numbers of a patch that the model takes"
        )
    copied = given.detach().to("cpu", copy=True).contiguous()
    if not bool(torch.isfinite(copied).all()):
        raise RequestError("pixel_values has NaN or infinite numbers; allowed: finite ones")
    return copied


def _starts(of_images: npt.NDArray[np.bool_], grids: list[Grid], layout: ImageLayout) -> list[int]:
    """Return the position of each image's first token."""
    counts = np.array([layout.count(grid) for grid in grids])
    places, ends = np.flatnonzero(of_images), np.cumsum(counts)
    if len(places) != ends[-1] or bool((places[ends - 1] - places[ends - counts] >= counts).any()):
        edges = np.flatnonzero(np.diff(of_images, prepend=False, append=False))
        raise RequestError(
            f"the prompt has runs of {shown((edges[1::2] - edges[::2]).tolist())} placeholders (token "
            f"{layout.token_id}), and its images take {shown(counts.tolist())}, one for {layout.merge} by "
            f"{layout.merge} patches; allowed: as many, in the order of the images, side by side for each"
        )
    starts: list[int] = places[ends - counts].tolist()
    return starts


def _digest(pixels: torch.Tensor, grid: Grid) -> bytes:
    named = hashlib.blake2b(repr((str(pixels.dtype), tuple(pixels.shape), grid)).encode(), digest_size=_DIGEST_BYTES)
    named.update(pixels.view(torch.uint8).numpy().data)
    return named.digest()


def _has_ints(given: torch.Tensor) -> bool:
    return not (given.is_floating_point() or given.is_complex() or given.is_meta or given.dtype is torch.bool)


def _described(given: object) -> str:
    return f"{list(given.shape)} of {given.dtype}" if isinstance(given, torch.Tensor) else shown(given)
