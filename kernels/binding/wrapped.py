"""Find text and vision in models that Hugging Face wraps with vision (``...ForConditionalGeneration``).

Modules of vision that are not bound (`vision`), and those of audio, stay as they are: no text reaches them. Their
parameters stay the model's, for a caller that saves or shards it.
"""

from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.families.family import Family


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
