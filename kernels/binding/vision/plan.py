"""Plan which forward each module of a vision tower gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from samebit.kernels.binding import modules as bound
from samebit.kernels.binding.attached import Attachment
from samebit.kernels.binding.families.family import BindingError
from samebit.kernels.binding.lora.forwards import linear_forward
from samebit.kernels.binding.lora.peft_model import is_wrapped
from samebit.kernels.binding.vision.forwards import (
    AnglesFacts,
    KnownSegments,
    VisionAttentionFacts,
    angles_forward,
    gelu_forward,
    patches_forward,
    vision_attention_forward,
)
from samebit.kernels.binding.vision.tower_family import TowerFamily
from samebit.kernels.layout.images.image_layout import ImageLayout
from samebit.kernels.ops.activation import ACTIVATIONS, TOWER_ACTIVATIONS

_THETA = 10000.0
"""The base of a tower's frequencies, which transformers before 5.24 has as a default and no config holds."""


@dataclass(frozen=True, eq=False)
class PlannedVision:
    """Holds the plan of a model's tower; None where it computes text alone, and why where that is not its family."""

    tower: TowerPlan | None
    why_none: str = ""

    @classmethod
    def of(cls, family: TowerFamily | None, wrapping: nn.Module | None, *, exact: bool) -> PlannedVision:
        """Plan the tower of a whole model, or find out why it can not be bound."""
        if family is None or wrapping is None:
            return cls(None)
        if not exact:
            return cls(None, " with exact=False")
        try:
            return cls(TowerPlan(family, wrapping))
        except BindingError as error:
            return cls(None, f", because {error}")

    @property
    def layout(self) -> ImageLayout | None:
        """Return what the model takes images as; None where it computes text alone."""
        return None if self.tower is None else self.tower.layout()

    def attachment_of(self, module: nn.Module) -> Attachment | None:
        """Return what a module of vision gets; None for one that keeps the forward of its class."""
        return None if self.tower is None else self.tower.parts.get(module)


class TowerPlan:
    """Holds what each module of a tower gets; None for one that keeps the forward of its class.

    Raises:
        BindingError: a module that is not bound exactly, by name.
    """

    def __init__(self, family: TowerFamily, wrapping: nn.Module) -> None:
        self.family = family
        self.tower: Any = wrapping.get_submodule("visual")
        config: Any = wrapping.config
        self.config = config.vision_config
        self.token_id: int = config.image_token_id
        self._segments = KnownSegments()
        self._check_axes(wrapping)
        self.parts = {module: self._part(f"visual.{name}", module) for name, module in self.tower.named_modules()}

    def _check_axes(self, wrapping: Any) -> None:
        """Check that it is known by which of an image's positions each frequency turns."""
        rotary = wrapping.language_model.rotary_emb
        count = rotary.inv_freq.numel()
        given = rotary.config.rope_parameters.get("mrope_section")
        if self.family.axes_of(given, count) is None:
            raise BindingError(
                f"rope_parameters of its text model have mrope_section={given!r}; allowed: three numbers, {count} "
                "together, of the frequencies that turn by time, height and width"
            )

    def layout(self) -> ImageLayout:
        """Return what the model takes images as."""
        weight = self.tower.patch_embed.proj.weight
        return ImageLayout(self.token_id, self.tower.spatial_merge_size, weight[0].numel())

    def _part(self, name: str, module: nn.Module) -> Attachment | None:
        self._check_weights(name, module)
        family, kind = self.family, type(module).__name__
        if kind == family.patches:
            return Attachment(patches_forward)
        if kind in family.angles:
            return Attachment(angles_forward, self._angles())
        if kind == family.attention:
            return Attachment(vision_attention_forward, self._attention(module))
        if kind == family.mlp:
            return Attachment(bound.mlp_forward, self._mlp(name))
        if kind == family.norm:
            return Attachment(bound.rms_norm_forward, bound.NormFacts(vars(module)["variance_epsilon"], 0.0))
        if type(module) is nn.Linear:
            return Attachment(linear_forward)
        if type(module) is nn.LayerNorm and module.weight is not None and module.bias is not None:
            return Attachment(bound.layer_norm_forward)
        if type(module) is nn.GELU:
            return Attachment(gelu_forward)
        if self._needs_no_binding(name, module):
            return None
        if is_wrapped(module):
            raise BindingError(f"{name} has an adapter, which is not exact in a tower")
        raise BindingError(f"{name} is a {kind}, which is not bound exactly")

    def _needs_no_binding(self, name: str, module: nn.Module) -> bool:
        containers = (
            type(module) in (nn.ModuleList, nn.Sequential, nn.Embedding)
            or type(module).__name__ in self.family.containers
        )
        activation = type(module) is type(ACT2FN[self.config.hidden_act])  # the bound MLP computes it
        return containers or activation or self._is_of_patches(name, module)

    def _is_of_patches(self, name: str, module: nn.Module) -> bool:
        """Return whether it is the convolution of patches, if its kernels lie side by side."""
        plain = name == "visual.patch_embed.proj" and type(module) in (nn.Conv2d, nn.Conv3d)
        if not plain:
            return False
        conv: Any = module
        padded = conv.padding not in (0, "valid") and any(conv.padding)
        return conv.kernel_size == conv.stride and not padded and conv.groups == 1 and set(conv.dilation) == {1}

    def _check_weights(self, name: str, module: nn.Module) -> None:
        if any(isinstance(vars(module).get(key), torch.Tensor) for key in ("weight", "bias")):
            raise BindingError(f"the weight of {name} is no parameter but made anew before each call")

    @property
    def _head_size(self) -> int:
        block: Any = self.tower.blocks[0].attn
        size: int = block.qkv.weight.shape[0] // 3 // block.num_heads
        return size

    def _attention(self, module: nn.Module) -> VisionAttentionFacts:
        return VisionAttentionFacts(vars(module)["num_heads"], self._head_size**-0.5, self._segments)

    def _angles(self) -> AnglesFacts:
        """Return the frequencies, computed anew: those that the module has may have been cast."""
        half = self._head_size // 2
        parameters = vars(self.config).get("rope_parameters") or {}
        exponents = torch.arange(0, half, 2, dtype=torch.float, device="cpu") / half
        return AnglesFacts(1.0 / (parameters.get("rope_theta", _THETA) ** exponents))

    def _mlp(self, name: str) -> bound.MLPFacts:
        names, activation = self.family.mlp_names, self.config.hidden_act
        exact = ACTIVATIONS if names[0] else TOWER_ACTIVATIONS
        if activation not in exact:
            raise BindingError(f"{name} has the activation {activation!r} (exact: {', '.join(exact)})")
        return bound.MLPFacts(activation, "separate" if names[0] else "plain", names=names)
