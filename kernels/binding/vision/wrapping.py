"""Define the forward of the module that holds a text model and its vision: with images where the tower is bound.

Invariants:

* What is neither text nor an image is refused by name before anything is computed.
* A call computes the features of its images inside of this forward, where FSDP2 has the tower's weights; the decoder
  puts them in the place of embeddings (`modules.decoder_forward`), by the layout that is installed around it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from samebit.kernels.binding.modules import refuse_unread
from samebit.kernels.binding.vision.given import GivenImages
from samebit.kernels.binding.vision.rows import text_positions
from samebit.kernels.layout.forward_context import ForwardContext, installed_context, training_context, use_context
from samebit.kernels.layout.images.image_layout import ImageLayout
from samebit.kernels.ops.score_arguments import check_no_tangents

IMAGES = ("pixel_values", "image_grid_thw")
"""Names the arguments that hold images of a tower that is bound."""

_OTHERS = (
    *("pixel_values_videos", "video_grid_thw", "image_sizes", "second_per_grid_ts"),
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


@dataclass(frozen=True)
class WrappingFacts:
    """Says what a module around a text model takes images as; where it takes none, ``images`` is None, and why."""

    images: ImageLayout | None
    why: str = ""


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
    """Run the text model, on the features of images where there are any, and nothing of the class's own forward:
    trainers replace that, to let vision run idle.

    Raises:
        ValueError: an argument that holds or describes what is not exact, by name; images that are not those of the
            tokens.
    """
    given = {"pixel_values": pixel_values, **kwargs}
    facts: WrappingFacts = self.samebit
    images = facts.images if any(given.get(name) is not None for name in IMAGES) else None
    _refuse_others(self, facts, given, with_images=images is not None)
    dropped = (*IMAGES, *_OTHERS, *_KINDS_OF_TOKENS, *_OF_THE_WHOLE)
    of_text = {name: value for name, value in kwargs.items() if name not in dropped}
    if past_key_values is not None:  # transformers 5.24 knows another name, and the text model refuses both
        of_text["past_key_values"] = past_key_values
    of_text |= {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    if images is None:
        outputs = self.language_model(attention_mask=attention_mask, position_ids=position_ids, **of_text)
    else:
        if installed_context() is None:
            check_no_tangents("a bound model")
            refuse_unread(self.language_model.config, {**kwargs, "position_ids": position_ids})
        with use_context(_with_features(self, images, input_ids, attention_mask, position_ids, given)):
            outputs = self.language_model(**of_text)
    if not isinstance(outputs, tuple):
        vars(outputs).update(dict.fromkeys(_NOT_OF_TEXT))
    return outputs


def _refuse_others(self: Any, facts: WrappingFacts, given: Mapping[str, Any], *, with_images: bool) -> None:
    refused = _OTHERS if with_images else (*IMAGES, *_OTHERS)
    found = [name for name in refused if given.get(name) is not None]
    for name in _KINDS_OF_TOKENS:
        kinds = given.get(name)
        if isinstance(kinds, torch.Tensor) and bool(kinds.any()) and not (with_images and name == "mm_token_type_ids"):
            found.append(f"{name} (with tokens of images)")
    if not found:
        return
    name = type(self).__name__
    if facts.images is None:
        raise ValueError(
            f"{', '.join(found)}: a bound {name} computes text alone{facts.why}; images, videos and audio are not "
            "exact. Leave them out, or keep a model that is not bound"
        )
    raise ValueError(
        f"{', '.join(found)}: a bound {name} computes text and images (pixel_values with image_grid_thw); videos and "
        "audio are not exact. Leave them out, or keep a model that is not bound"
    )


def _with_features(
    self: Any,
    layout: ImageLayout,
    ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    given: Mapping[str, Any],
) -> ForwardContext:
    """Return the layout of a call with images, and with it their features."""
    pixels, grids, kinds = (given.get(name) for name in (*IMAGES, "mm_token_type_ids"))
    images = GivenImages.of(layout, pixels, grids, kinds)
    if ids is None or images is None:
        raise ValueError("images with inputs_embeds; allowed: with input_ids, which say where they stand")
    context = installed_context()
    if context is None:
        batch, width = ids.shape
        context = training_context((batch, width), attention_mask, text_positions(position_ids), ids.device)
        rows = images.rows_of(ids, position_ids, context)
    elif context.images is None:
        raise ValueError("pixel_values in a call whose installed ForwardContext knows of no images")
    else:
        rows = context.images
    features = features_of(self, images.pixel_values, images.image_grid_thw)
    return replace(context, images=replace(rows, features=features))


class _PlacesInFloat32(TorchFunctionMode):
    """Keeps places between the rows and columns of embeddings in float32, whatever torch's default dtype is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as ever, but for numbers on a line that have no dtype."""
        given = kwargs or {}
        return func(*args, **({"dtype": torch.float32} | given if func is torch.linspace else given))


def features_of(wrapping: Any, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
    """Return the features of images (`ImageRows.features`) by a call of the tower."""
    with pixel_values.device, _PlacesInFloat32():
        made = wrapping.visual(pixel_values, grid_thw=image_grid_thw)
    return torch.cat([made["pooler_output"], *(made.get("deepstack_features") or [])], dim=-1)
