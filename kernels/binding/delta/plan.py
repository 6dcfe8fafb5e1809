"""Find out what `bind` has to know about the Gated DeltaNet layers of a model."""

from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.attached import Attachment
from samebit.kernels.binding.delta.mixer import DeltaFacts, delta_forward
from samebit.kernels.binding.families.delta_family import DeltaFamily
from samebit.kernels.binding.families.family import BindingError
from samebit.kernels.binding.recurrent_plan import RecurrentPlan
from samebit.kernels.layout.layers.delta import MixerOptions
from samebit.kernels.layout.options import DeltaOptions, GatedNormOptions
from samebit.kernels.layout.states.delta import DeltaShape


class DeltaPlan(RecurrentPlan):
    """Decides the facts of the Gated DeltaNet layers."""

    def __init__(self, prefix: str, family: DeltaFamily, config: Any, chunk: int) -> None:
        super().__init__(chunk)
        self.prefix = prefix
        self.family = family
        self.config = config

    def is_mixer(self, module: nn.Module) -> bool:
        """Return whether this module is a Gated DeltaNet layer of the family."""
        return type(module).__name__ == self.prefix + self.family.mixer

    def mixer(self, name: str, module: Any) -> Attachment:
        """Plan one layer.

        Raises:
            BindingError: sizes, an activation, a convolution or a norm that is not exact.
        """
        attributes = vars(module)
        names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
        if self.family.by_channel:
            names = ("num_heads", "num_heads", "head_dim", "head_dim")
        key_heads, value_heads, key_dim, value_dim = (attributes[key] for key in names)
        taps, by_channel = attributes["conv_kernel_size"], self.family.by_channel
        shape = DeltaShape(key_heads, value_heads, key_dim, value_dim, taps, by_channel)
        self._check_sizes(name, shape)
        convolutions = self._convolutions(name, module, shape)
        self._check_activation(name, module)
        norm = self._norm(name, module.get_submodule(self.family.norm), shape)
        self.shapes.append(shape)
        self._leave_to_the_layer(name, module, (*convolutions, self.family.norm))
        negative = self.family.negative_eigenvalues
        options = DeltaOptions(
            layer=len(self.shapes) - 1,
            chunk=self.chunk,
            key_heads=shape.key_heads,
            value_heads=shape.value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            by_channel=shape.by_channel,
        )
        beta_scale = 2.0 if negative and self.config.to_dict()[negative] else 1.0
        one_call, by_key_head = None, self.family.projections == "by_key_head"
        if by_key_head or self.family.projections == "joined":
            one_call = MixerOptions(options, norm, attributes["hidden_size"], taps, beta_scale, by_key_head)
        return Attachment(delta_forward, DeltaFacts(self.family, options, convolutions, norm, beta_scale, one_call))

    def _check_sizes(self, name: str, shape: DeltaShape) -> None:
        sizes = (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.taps)
        if min(sizes) < 1 or shape.value_heads % shape.key_heads:
            raise BindingError(
                f"{self.prefix}: {name} has {shape}; allowed: at least 1 of each, and key heads that divide value heads"
            )
        if self.shapes and shape != self.shapes[0]:
            raise BindingError(f"{self.prefix}: {name} has {shape}; allowed: as the layers before it, {self.shapes[0]}")

    def _convolutions(self, name: str, module: nn.Module, shape: DeltaShape) -> tuple[str, ...]:
        """Return the names of the convolutions: one, or one each of q, k and v, in that order."""
        children = dict(module.named_children())
        keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        widths = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}
        if "conv1d" in children:
            widths = {"conv1d": shape.conv_width}
        for part, width in widths.items():
            self._check_convolution(f"{name}.{part}", children[part], (width, 1, shape.taps))
        return tuple(widths)

    def _check_convolution(self, name: str, conv: Any, size: tuple[int, int, int]) -> None:
        plain = isinstance(conv, nn.Conv1d) and conv.weight.shape == size and conv.bias is None
        if not plain or (conv.stride, conv.dilation, conv.padding) != ((1,), (1,), (size[2] - 1,)):
            raise BindingError(
                f"{self.prefix}: {name} is {conv}, not a depthwise causal convolution without a bias of "
                f"{size[0]} channels and {size[2]} taps"
            )

    def _check_activation(self, name: str, module: nn.Module) -> None:
        """Check that convolutions are followed by silu; where no attribute says so, the config's activation does."""
        said = vars(module).get("activation", self.config.hidden_act)
        if said not in ("silu", "swish"):
            raise BindingError(f"{self.prefix}: {name} has the activation {said!r} (exact: silu)")

    def _norm(self, name: str, norm: nn.Module, shape: DeltaShape) -> GatedNormOptions:
        kind, attributes = type(norm).__name__, vars(norm)
        own = [self.prefix + part for part in self.family.gated_norms]
        if kind not in (*own, *self.family.foreign_norms):
            raise BindingError(f"{self.prefix}: {name}.{self.family.norm} is a {kind}, not bound exactly")
        said = attributes.get("activation", "silu")
        exact = ("sigmoid",) if self.family.by_channel else ("silu", "swish")
        if said not in exact:
            raise BindingError(f"{self.prefix}: {name}.{self.family.norm} has the gate {said!r} (exact: {exact[0]})")
        weight = dict(norm.named_parameters()).get("weight")
        if weight is None or weight.shape != torch.Size([shape.value_dim]):
            found = "None" if weight is None else list(weight.shape)
            raise BindingError(
                f"{self.prefix}: the weight of {name}.{self.family.norm} is {found}; allowed: [{shape.value_dim}]"
            )
        eps = attributes["variance_epsilon"] if "variance_epsilon" in attributes else attributes["eps"]
        return GatedNormOptions(eps, shape.value_heads, gate_first=False, sigmoid=self.family.by_channel)

    def _leave_to_the_layer(self, name: str, module: nn.Module, parts: tuple[str, ...]) -> None:
        """Note what the layer's forward computes itself: these parts, what is in them, and the activation."""
        for part, child in module.named_children():
            if part in parts or part == "act":
                self.inside |= {f"{name}.{part}.{inner}".removesuffix(".") for inner, _ in child.named_modules()}
            elif part == "forget_gate":
                self.inside.add(f"{name}.{part}")
