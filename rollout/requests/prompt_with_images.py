"""Take a prompt with images from a caller: its tokens, and what a processor has made of the images.

Invariant: nothing is checked against a model here (`images` does); what is no prompt at all is a `RequestError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samebit.rollout.checks import shown
from samebit.rollout.errors import RequestError

_NEEDED = ("input_ids", "pixel_values", "image_grid_thw")
_OF_OTHER_MEDIA = ("pixel_values_videos", "video_grid_thw", "input_features", "input_audio_features")


@dataclass(frozen=True, eq=False)
class PromptWithImages:
    """Holds a prompt some of whose tokens stand for images; a worker takes it in place of token ids.

    token_ids: the prompt's, with a run of the model's placeholders for each image, as many as the image has tokens.
    pixel_values: ``[patches of all images, numbers of a patch]``, floating.
    image_grid_thw: ``[images, 3]``, how many patches each image has in time (1), height and width.

    The tensors are copied when the prompt is submitted, and may be changed from then on.
    """

    token_ids: list[int]
    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor

    @classmethod
    def of(cls, processed: Mapping[str, Any]) -> PromptWithImages:
        """Make it of what a Hugging Face processor gives for one prompt.

        Args:
            processed: `input_ids` ``[1, T]`` or ``[T]``, `pixel_values`, `image_grid_thw`; with an `attention_mask`,
                padding on the left is cut. Other entries are not read.

        Raises:
            RequestError: one of these is missing, there are videos or audio, several prompts, or other padding.
        """
        if not isinstance(processed, Mapping):
            raise RequestError(f"a processor gives a mapping of {', '.join(_NEEDED)}, got {shown(processed)}")
        missing = [name for name in _NEEDED if processed.get(name) is None]
        if missing:
            raise RequestError(
                f"the processor's output has no {' and no '.join(missing)}, got {shown(sorted(map(str, processed)))}; "
                "a prompt without images is a list of token ids"
            )
        others = [name for name in _OF_OTHER_MEDIA if processed.get(name) is not None]
        if others:
            raise RequestError(f"the processor's output has {' and '.join(others)}; allowed: images alone")
        ids = _row("input_ids", processed["input_ids"])
        mask = processed.get("attention_mask")
        return cls(
            (ids if mask is None else ids[_padding(_row("attention_mask", mask), len(ids)) :]).tolist(),
            _tensor("pixel_values", processed["pixel_values"]),
            _tensor("image_grid_thw", processed["image_grid_thw"]),
        )


GivenPrompt = list[int] | PromptWithImages
"""Is what a caller gives as a prompt."""


def refuse_images(prompts: Iterable[object]) -> None:
    """Raise `RequestError` if a prompt has images, where only ids are taken."""
    if any(isinstance(prompt, PromptWithImages) for prompt in prompts):
        raise RequestError(
            "got a PromptWithImages, which a RolloutWorker and one in an actor of Ray take, and no fleet or server; "
            "allowed here: a list of token ids"
        )


def _tensor(name: str, given: object) -> torch.Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"the processor's {name} must be a tensor, or numbers that make one: {error}") from error


def _row(name: str, given: object) -> torch.Tensor:
    """Return numbers of one prompt, ``[T]``."""
    row = _tensor(name, given)
    if row.dim() == 2 and len(row) == 1:
        row = row[0]
    if row.dim() != 1:
        raise RequestError(f"{name} has the shape {list(row.shape)}; allowed: one prompt, [1, T] or [T]")
    return row


def _padding(mask: torch.Tensor, length: int) -> int:
    """Return how many tokens on the left are padding."""
    if len(mask) != length:
        raise RequestError(f"attention_mask has {len(mask)} numbers, and input_ids {length}; allowed: as many")
    padding = int((mask == 0).sum())
    if bool((mask[padding:] == 0).any()):
        raise RequestError(f"attention_mask is {shown(mask.tolist())}; allowed: ones, behind zeros on the left or none")
    return padding
