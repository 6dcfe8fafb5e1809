"""Make prompts with images of what an agent loop hands on: token ids, and images as PIL has them.

Invariant: patches are those that the trainer gets. verl's own function makes both, with a processor of the same folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.tokenizer import hf_processor
from verl.utils.tokenizer.tokenizer import build_multimodal_processor_inputs, get_processor_token_id

from samebit.rollout.errors import ModelLoadError
from samebit.rollout.requests.prompt_with_images import PromptWithImages


class ImageReader:
    """Reads the images of requests, one request after the other: processors are not made for several threads.

    never: placeholders, which are not sampled. verl takes a placeholder that was sampled for one of an image,
    looks for the image when it works out positions, and fails.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._alone = asyncio.Lock()
        found = (get_processor_token_id(processor, kind) for kind in ("image", "video"))
        self.never = [token for token in found if token is not None]

    @classmethod
    def of(cls, folder: str) -> ImageReader:
        """Return one with the processor that verl's agent loops load from the folder.

        Raises:
            ModelLoadError: verl makes none of it.
        """
        processor = hf_processor(folder, trust_remote_code=False)
        if processor is None:
            raise ModelLoadError(
                f"rollout.custom.images=True, and verl makes no processor of {folder} (its warning says why: 'Failed "
                "to create processor'); allowed: a folder whose processor verl's agent loops load, or False"
            )
        return cls(processor)

    async def prompt(
        self, ids: list[int], images: Sequence[Any], options: Mapping[str, Any] | None
    ) -> PromptWithImages:
        """Return a prompt with these images at its placeholders. options: verl's `data.mm_processor_kwargs`.

        Raises:
            ValueError: what the processor refuses.
        """
        async with self._alone:
            made = await asyncio.to_thread(self._read, images, options)
        return PromptWithImages(ids, made["pixel_values"], made["image_grid_thw"])

    def _read(self, images: Sequence[Any], options: Mapping[str, Any] | None) -> Mapping[str, Any]:
        text = self._processor.image_token * len(images)
        made: Mapping[str, Any] = build_multimodal_processor_inputs(
            self._processor, text=[text], images=list(images), mm_processor_kwargs=options
        )
        return made
