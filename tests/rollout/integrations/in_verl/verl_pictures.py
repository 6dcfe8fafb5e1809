"""Let verl read pictures without torchvision and qwen_vl_utils, by VERL_USE_EXTERNAL_MODULES and `data.custom_cls`.

The processor is the real one but for that of videos, which needs torchvision; verl knows it by its name, so it is the
class itself that is changed. The data set gives pictures as they are, where verl's own asks qwen_vl_utils.
"""

from __future__ import annotations

from typing import Any

from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from verl.utils.dataset.rl_dataset import RLHFDataset

_with_videos = Qwen2_5_VLProcessor.__init__


def _without_videos(
    self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any
) -> None:
    _with_videos(self, image_processor, tokenizer, chat_template=chat_template)


Qwen2_5_VLProcessor.__init__ = _without_videos  # transformers reads its signature: a part a parameter


class Pictures(RLHFDataset):  # type: ignore[misc]
    """Gives the pictures of a conversation in their own size."""

    @classmethod
    def _process_multi_modal_info(cls, messages: Any, *_: Any, **__: Any) -> tuple[list[Any] | None, None, None]:
        blocks = [block for message in messages if isinstance(message["content"], list) for block in message["content"]]
        pictures = [block["image"].convert("RGB") for block in blocks if block["type"] == "image"]
        return pictures or None, None, None


def compute_score(solution_str: str, **_: Any) -> float:
    """Reward answers by their length, which differs, so that there is something to learn."""
    return len(solution_str) / 100
