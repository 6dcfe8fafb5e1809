"""Make a folder in the format of Qwen2.5-VL's for tests of verl: a small random model, and its processor."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from samebit.recipes import tiny_model

from ...exactness.families import make_wrapped
from ...exactness.images import TOWERS
from .in_verl import verl_pictures  # noqa: F401  (makes a processor without videos)

PLACEHOLDER, OF_VIDEOS = "<|image_pad|>", "<|video_pad|>"
SPECIAL = ["<|im_end|>", "<|vision_start|>", "<|vision_end|>", PLACEHOLDER, OF_VIDEOS, "\n"]

TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for block in message['content'] %}{% if block['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ block['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of characters, with Qwen's special tokens."""
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


def save_vision_model(folder: Path) -> Path:
    """Write the model, tokenizer and processor; return the folder."""
    tokenizer = vision_tokenizer()
    pixels = Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    make_wrapped(
        "Qwen2",
        around={
            "vision_config": TOWERS["Qwen2"],
            "image_token_id": tokenizer.convert_tokens_to_ids(PLACEHOLDER),
            "video_token_id": tokenizer.convert_tokens_to_ids(OF_VIDEOS),
        },
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder)
    Qwen2_5_VLProcessor(pixels, tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def picture(height: int, width: int, seed: int) -> Image.Image:
    """Return a picture of noise of a size in pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def build_pictures(folder: Path) -> Path:
    """Write the model, and prompts with none to two pictures in the columns that verl reads; return the folder."""
    save_vision_model(folder / "model")
    for name in ("train", "test"):
        rows = [
            {
                "data_source": "pictures",
                "prompt": [{"role": "user", "content": "<image>" * (index % 3) + f"{index}+{index + 1}="}],
                "images": [{"bytes": _png(16 + index % 9, 20 + 4 * number, index)} for number in range(index % 3)],
                "ability": "arithmetic",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
            for index in range(24)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder


def _png(height: int, width: int, seed: int) -> bytes:
    file = io.BytesIO()
    picture(height, width, seed).save(file, "PNG")
    return file.getvalue()
