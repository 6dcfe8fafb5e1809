"""Say as what a folder is read: as the text model in it, or as the whole, which computes images too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers import AutoModelForImageTextToText as AutoModelWithImages

from samebit.kernels.binding.binding import binding_of
from samebit.kernels.binding.families.inexact import DROPOUTS
from samebit.kernels.binding.families.known import CLASSES_WITH_IMAGES
from samebit.rollout.errors import ModelLoadError
from samebit.rollout.models.text_config import read_text_config


@dataclass(frozen=True)
class ModelKind:
    """Says which config of a folder is read, and which of transformers' classes makes a model of it.

    whole: all of the model has to be in the folder, what no text reaches too.
    """

    read_config: Callable[[Path], Any]
    auto: Any
    whole: bool

    @classmethod
    def of(cls, images: bool) -> ModelKind:
        """Return the kind of a model that computes images, or text alone."""
        return WITH_IMAGES if images else TEXT


def read_whole_config(folder: Path) -> Any:
    """Return the config of a folder's model with vision, which asks for no dropout in any part of it. Where the whole
    says which tokens end a text, its text model does.

    Raises:
        ModelLoadError: a model whose images are not computed.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if model_class is None or model_class.__name__ not in CLASSES_WITH_IMAGES:
        kind = config.model_type if model_class is None else model_class.__name__
        raise ModelLoadError(
            f"images=True, and {folder} holds a {kind}, which computes text alone; allowed: False, or a folder of "
            f"{', '.join(CLASSES_WITH_IMAGES)}"
        )
    text = config.get_text_config()
    for part in (config, text, config.vision_config):
        for name in DROPOUTS:
            if vars(part).get(name):
                setattr(part, name, 0.0)
    text.eos_token_id = vars(config).get("eos_token_id") or text.eos_token_id
    return config


def check_computes_images(module: nn.Module) -> None:
    """Check that a bound module, for which images were asked, computes them.

    Raises:
        ModelLoadError: it computes text alone; it says why.
    """
    binding = binding_of(module)
    if binding.images is None:
        raise ModelLoadError(
            f"images=True, and this {type(module).__name__} computes text alone{binding.why_no_images}; allowed: "
            f"False, or a {', '.join(CLASSES_WITH_IMAGES)} whose vision is bound"
        )


TEXT = ModelKind(read_text_config, AutoModelForCausalLM, whole=False)
WITH_IMAGES = ModelKind(read_whole_config, AutoModelWithImages, whole=True)
