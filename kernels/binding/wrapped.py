"""Bind models that Hugging Face wraps with vision (``...ForConditionalGeneration``), for text alone.

Invariants:

* What is not text is refused by name before anything is computed.
* The modules of vision and audio stay as they are: no text reaches them. Their parameters stay the model's, for a
  caller that saves or shards it.
"""

from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.families.family import Family

_OF_IMAGES = (
    *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes", "second_per_grid_ts"),
    *("mm_encoder_outputs", "visual_pos_masks", "deepstack_visual_embeds", "spatial_shapes", "pixel_attention_mask"),
    *("image_sizes_videos", "batch_num_images"),
    *("image_position_ids", "video_position_ids", "num_frames_per_video", "input_features", "input_features_mask"),
)
"""Names arguments of the wrapping models' forwards, and of the text models in them; the last two hold audio."""

_NOT_OF_TEXT = (
    *("rope_deltas", "image_hidden_states", "video_hidden_states", "audio_hidden_states"),
    *("image_outputs", "video_outputs", "audio_outputs"),
)
"""Names what the whole model hands on of the wrapping model's output: how far images move the positions behind them,
and what vision and audio made, in one piece since transformers 5.24."""

_KINDS_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")
"""Names the arguments that tell tokens of images, 1 or more, from those of text, 0: of Gemma-3's the second, among
which it attends to later ones too."""

_OF_THE_WHOLE = ("labels", "vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio")
"""Names arguments that the whole model hands on and that say nothing about text: its loss is made behind the head, and
what is taken of vision where there are images."""


def wrapping_module(family: Family, model: nn.Module) -> nn.Module | None:
    """Return the module that holds the text model and the vision model; None where there is no vision."""
    kind = family.wrapping_class
    return next((module for module in model.modules() if type(module).__name__ == kind), None) if kind else None


def modules_of_vision(wrapping: nn.Module | None) -> frozenset[nn.Module]:
    """Return the modules that no text reaches: all that the wrapping module holds beside its text model."""
    if wrapping is None:
        return frozenset()
    others = [child for name, child in wrapping.named_children() if name != "language_model"]
    return frozenset(module for child in others for module in child.modules())


def unread_keys(family: Family, kind: str, config: dict[str, Any]) -> list[str]:
    """Return what the text config of a model of this class says and the class does not do, each with its cause: the
    text model alone, which a folder of it loads as, would."""
    if family.wrapped is None or kind != family.whole_class:
        return []
    return [
        f"{key}={config[key]!r}, which its forward does not read and that of its text model alone does (exact: None)"
        for key in family.wrapped.unread
        if config.get(key) is not None
    ]


def positions_of_text(given: torch.Tensor | None, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the positions of tokens given three or four times, for text, time, height and width; others as they are.

    Args:
        given: ``[3, B, T]`` or ``[4, B, T]``, alike in every token.
        attention_mask: ``[B, T]``, above 0 for tokens; None for all.

    Raises:
        ValueError: positions of images, which are not alike.
    """
    if not isinstance(given, torch.Tensor) or given.dim() != 3 or len(given) not in (3, 4):
        return given
    of_tokens = given if attention_mask is None else given.masked_fill(attention_mask.to(given.device) == 0, 0)
    if bool((of_tokens != of_tokens[:1]).any()):
        raise ValueError(
            f"position_ids of the shape {list(given.shape)} differ along the first axis: they are those of images, "
            "which are not exact; allowed: those of text, alike there"
        )
    return given[0]


def wrapping_forward(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: object = None,
    inputs_embeds: torch.Tensor | None = None,
    pixel_values: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Run the text model, and nothing of the class's own forward: trainers replace that, to let vision run idle.

    Raises:
        ValueError: an argument that holds or describes images, videos or audio, by name.
    """
    given = {"pixel_values": pixel_values, **kwargs}
    found = [name for name in _OF_IMAGES if given.get(name) is not None]
    for name in _KINDS_OF_TOKENS:
        kinds = given.get(name)
        if isinstance(kinds, torch.Tensor) and bool(kinds.any()):
            found.append(f"{name} (with tokens of images)")
    if found:
        raise ValueError(
            f"{', '.join(found)}: a bound {type(self).__name__} computes text alone; images, videos and audio are not "
            "exact. Leave them out, or keep a model that is not bound"
        )
    dropped = (*_OF_IMAGES, *_KINDS_OF_TOKENS, *_OF_THE_WHOLE)
    of_text = {name: value for name, value in kwargs.items() if name not in dropped}
    if past_key_values is not None:  # transformers 5.24 knows another name, and the text model refuses both
        of_text["past_key_values"] = past_key_values
    outputs = self.language_model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        inputs_embeds=inputs_embeds,
        **of_text,
    )
    if not isinstance(outputs, tuple):
        vars(outputs).update(dict.fromkeys(_NOT_OF_TEXT))
    return outputs
