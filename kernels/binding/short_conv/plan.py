"""Find out what `bind` has to know about the gated short convolutions of a model."""

from typing import Any

from torch import nn

from samebit.kernels.binding.attached import Attachment
from samebit.kernels.binding.families.family import BindingError
from samebit.kernels.binding.recurrent_plan import RecurrentPlan
from samebit.kernels.binding.short_conv.mixer import ShortConvFacts, short_conv_forward
from samebit.kernels.layout.states.conv import ConvShape


class ShortConvPlan(RecurrentPlan):
    """Decides the facts of the gated short convolutions."""

    def __init__(self, prefix: str, kind: str, chunk: int) -> None:
        super().__init__(chunk)
        self.prefix = prefix
        self.kind = kind

    def is_mixer(self, module: nn.Module) -> bool:
        """Return whether this module is a gated short convolution of the family."""
        return type(module).__name__ == self.prefix + self.kind

    def mixer(self, name: str, module: Any) -> Attachment:
        """Plan one layer.

        Raises:
            BindingError: a convolution that is not exact.
        """
        self.shapes.append(self._shape(f"{name}.conv", module.conv))
        self.inside.add(f"{name}.conv")
        return Attachment(short_conv_forward, ShortConvFacts(len(self.shapes) - 1))

    def _shape(self, name: str, conv: Any) -> ConvShape:
        """Return the sizes of a convolution.

        Raises:
            BindingError: it is no depthwise causal one, keeps no window, or differs in size from those before it.
        """
        channels, _, taps = conv.weight.shape if type(conv) is nn.Conv1d else (0, 0, 0)
        depthwise = taps > 0 and conv.groups == conv.in_channels == conv.out_channels and conv.padding_mode == "zeros"
        if not depthwise or (conv.stride, conv.dilation, conv.padding) != ((1,), (1,), (taps - 1,)):
            raise BindingError(f"{self.prefix}: {name} is {conv}, not a depthwise causal convolution")
        if taps < 2:
            raise BindingError(f"{self.prefix}: {name} has {taps} tap (conv_L_cache); allowed: at least 2")
        shape = ConvShape(channels, taps)
        if self.shapes and shape != self.shapes[0]:
            raise BindingError(f"{self.prefix}: {name} has {shape}; allowed: as the layers before it, {self.shapes[0]}")
        return shape
