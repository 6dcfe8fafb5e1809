"""Find out what `bind` has to know about the Mamba2 mixers of a model."""

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from samebit.kernels.binding.attached import Attachment
from samebit.kernels.binding.families.family import BindingError, Family
from samebit.kernels.binding.mamba.mixer import MambaFacts, mamba_forward
from samebit.kernels.binding.recurrent_plan import RecurrentPlan
from samebit.kernels.layout.options import GatedNormOptions, SSMOptions
from samebit.kernels.layout.states.mamba import SSMShape

_SILU = (nn.SiLU, type(ACT2FN["silu"]))


class MambaPlan(RecurrentPlan):
    """Decides the facts of the Mamba2 mixers; of a family without, it finds none."""

    def __init__(self, family: Family, config: Any, chunk: int) -> None:
        super().__init__(chunk)
        self.family = family
        self.mamba = family.mamba
        self.config = config

    def is_mixer(self, module: nn.Module) -> bool:
        """Return whether this module is a mixer of the family."""
        return bool(self.mamba.mixer) and type(module).__name__ == self.family.class_name(self.mamba.mixer)

    def mixer(self, name: str, module: Any) -> Attachment:
        """Plan one mixer.

        Raises:
            BindingError: an activation, convolution or norm that is not exact, or a bias against the config.
        """
        attributes = vars(module)
        shape = SSMShape(
            heads=attributes["num_heads"],
            head_dim=attributes["head_dim"],
            groups=attributes["n_groups"],
            state_size=attributes["ssm_state_size"],
            taps=attributes["conv_kernel_size"],
        )
        self._check_sizes(name, shape)
        self._check(name, module, shape)
        self.shapes.append(shape)
        self.inside |= {f"{name}.{part}" for part in ("act", "conv1d", "norm")}
        options = SSMOptions(len(self.shapes) - 1, self.chunk, shape.groups, shape.state_size, self._dt_limits())
        multipliers = self.config.ssm_multipliers if "ssm_in_multiplier" in attributes else None
        facts = MambaFacts(
            inner=shape.inner,
            conv_width=shape.conv_width,
            options=options,
            norm=self._norm(name, module, shape),
            in_multiplier=attributes.get("ssm_in_multiplier", 1.0),
            multipliers=_multipliers(shape, multipliers),
        )
        return Attachment(mamba_forward, facts)

    def _check_sizes(self, name: str, shape: SSMShape) -> None:
        if (
            min(shape.heads, shape.head_dim, shape.groups, shape.state_size, shape.taps) < 1
            or shape.heads % shape.groups
        ):
            raise BindingError(
                f"{self.family.prefix}: {name} has {shape}; allowed: at least 1 of each, and groups that divide heads"
            )

    def _check(self, name: str, module: Any, shape: SSMShape) -> None:
        conv = module.conv1d
        depthwise = type(conv) is nn.Conv1d and conv.weight.shape == (shape.conv_width, 1, shape.taps)
        if not depthwise or (conv.stride, conv.dilation, conv.padding) != ((1,), (1,), (shape.taps - 1,)):
            raise BindingError(f"{self.family.prefix}: {name}.conv1d is {conv}, not a depthwise causal convolution")
        self._check_bias(f"{name}.conv1d.bias", conv.bias)
        if type(module.act) not in _SILU:
            raise BindingError(f"{self.family.prefix}: {name}.act is a {type(module.act).__name__} (exact: silu)")
        if module.in_proj.out_features != shape.inner + shape.conv_width + shape.heads:
            raise BindingError(f"{self.family.prefix}: {name}.in_proj also projects an MLP, which is not bound exactly")
        if self.shapes and shape != self.shapes[0]:
            raise BindingError(f"{self.family.prefix}: {name} has other sizes than the mixers before it")

    def _check_bias(self, name: str, bias: torch.Tensor | None) -> None:
        key = self.mamba.conv_bias
        said = self.config.to_dict()[key]
        if bool(said) != (bias is not None):
            found = "None" if bias is None else "a parameter"
            raise BindingError(f"{self.family.prefix}: {name} is {found}, but the config says {key}={said}")

    def _dt_limits(self) -> tuple[float, float]:
        if self.mamba.dt_floor:
            return float(self.config.time_step_min), float("inf")
        low, high = self.config.time_step_limit or (0.0, float("inf"))
        return float(low), float(high)

    def _norm(self, name: str, module: Any, shape: SSMShape) -> GatedNormOptions | None:
        facts = self.config.to_dict()
        if self.family.prefix == "FalconH1" and not facts["mamba_rms_norm"]:
            return None
        norm = module.norm
        if type(norm).__name__ not in self.mamba.gated_norms:
            raise BindingError(f"{self.family.prefix}: {name}.norm is a {type(norm).__name__}, not bound exactly")
        attributes = vars(norm)
        groups = attributes.get("n_groups") or shape.inner // attributes.get("group_size", shape.inner)
        return GatedNormOptions(attributes["variance_epsilon"], groups, not attributes.get("norm_before_gate", False))


def _multipliers(shape: SSMShape, factors: list[float] | None) -> tuple[tuple[int, float], ...]:
    """Return Falcon-H1's factors on gate, x, B, C and dt; empty where all are 1."""
    if factors is None or all(factor == 1.0 for factor in factors):
        return ()
    shared = shape.groups * shape.state_size
    return tuple(zip((shape.inner, shape.inner, shared, shared, shape.heads), factors, strict=True))
