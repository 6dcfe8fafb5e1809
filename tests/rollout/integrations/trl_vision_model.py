"""Make folders in the format of Qwen2.5-VL's and Qwen3-VL's for tests of TRL: a small random model, and a processor of
images and of bytes with the chat template of the real one, as TRL knows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoProcessor, PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from trl.chat_template_utils import qwen2_5_vl_chat_template, qwen3_vl_chat_template

from ...exactness.families import make_wrapped
from ...exactness.images import TOWERS
from .trl_model import byte_tokenizer

PLACEHOLDER, OF_VIDEOS = "<|image_pad|>", "<|video_pad|>"


class WithoutVideos(Qwen2_5_VLProcessor):
    """Is the real processor, but for that of videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


class ThirdWithoutVideos(Qwen3VLProcessor):
    """Is the real processor, but for that of videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


AutoProcessor.register(Qwen2_5_VLConfig, WithoutVideos, exist_ok=True)
AutoProcessor.register(Qwen3VLConfig, ThirdWithoutVideos, exist_ok=True)

_PROCESSORS = {
    "Qwen2": (WithoutVideos, qwen2_5_vl_chat_template),
    "Qwen3": (ThirdWithoutVideos, qwen3_vl_chat_template),
}


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with Qwen's special tokens, those of images among them."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", PLACEHOLDER, OF_VIDEOS]}
    )
    return tokenizer


def vision_folder(folder: Path, family: str) -> Path:
    """Write config.json, safetensors and the processor of a family of text ("Qwen2" or "Qwen3") with vision around it;
    return the folder."""
    tokenizer = vision_tokenizer()
    kind, template = _PROCESSORS[family]
    pixels = Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    make_wrapped(
        family,
        around={
            "vision_config": TOWERS[family],
            "image_token_id": tokenizer.convert_tokens_to_ids(PLACEHOLDER),
            "video_token_id": tokenizer.convert_tokens_to_ids(OF_VIDEOS),
        },
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder)
    kind(pixels, tokenizer, chat_template=template).save_pretrained(folder)
    return folder


def picture(height: int, width: int, seed: int) -> Image.Image:
    """Return an image of noise of a size in pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))
