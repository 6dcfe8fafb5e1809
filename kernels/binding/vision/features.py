"""Run the vision tower of a bound model: images in, embeddings of their tokens out."""

import torch
from torch import nn

from samebit.kernels.binding.binding import checked_binding_of
from samebit.kernels.binding.lora.peft_model import inner_model
from samebit.kernels.binding.vision.given import GivenImages
from samebit.kernels.binding.vision.wrapping import features_of
from samebit.kernels.binding.wrapped import wrapping_module


def image_features(model: nn.Module, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
    """Return the embeddings that images get as tokens, without gradients; those of an image depend on it alone.

    Args:
        model: bound (see `samebit.kernels.bind`), and computes images.
        pixel_values: ``[patches, width]``, of all images, as Hugging Face's processor makes them.
        image_grid_thw: ``[images, 3]`` integers, the patches of each in time, height and width.

    Returns:
        ``[tokens, hidden]`` in the model's dtype.

    Raises:
        ValueError: a model that is not bound or computes text alone, shapes that do not fit.
        TypeError: no tensors of the right numbers.
        BindingError: the model's modules are not those that were bound, by name.
    """
    binding = checked_binding_of(model)
    images = GivenImages.of(binding.images, pixel_values, image_grid_thw, None, binding.why_no_images)
    wrapping = wrapping_module(binding.family, inner_model(model))
    assert images is not None  # both are given
    with torch.no_grad():
        return features_of(wrapping, images.pixel_values, images.image_grid_thw)
