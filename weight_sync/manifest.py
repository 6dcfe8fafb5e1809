"""List what a model holds, by name, and check whether an offered set of tensors fits it.

Invariants
----------
* A manifest is data (names, shapes, dtypes, ties); it keeps no tensor alive and stays valid while the
  weights are asleep.
* `check` looks at names, shapes and dtypes only, so it runs before the first byte is written. It either
  returns or raises one error that names *every* tensor at fault.
* Tied weights are one tensor with several names: offering any one of the names covers all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class WeightMismatchError(ValueError):
    """The offered tensors do not fit the model; nothing was written."""


class NonFiniteWeightError(ValueError):
    """An offered tensor holds NaN or infinity; nothing was written."""


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        return cls(name, tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {dtype_name(self.dtype)}"


@dataclass(frozen=True)
class UpdateTerms:
    """Holds the terms of a receiver. `partial`: only some tensors will do; `cast`: so will other floating dtypes."""

    partial: bool = False
    cast: bool = False


@dataclass(frozen=True)
class Manifest:
    """Lists the names, shapes and dtypes of a model's tensors.

    specs: every accepted name. ties: the names that share one storage, first name first.
    """

    specs: dict[str, TensorSpec]
    ties: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, module: nn.Module) -> Manifest:
        """Return the manifest of a module's parameters and persistent buffers."""
        return cls.of_tensors(live_tensors(module))

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Manifest:
        groups: dict[object, list[str]] = {}
        for name, tensor in tensors.items():
            groups.setdefault(_identity(tensor), []).append(name)
        specs = {name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()}
        return cls(specs, tuple(tuple(names) for names in groups.values()))

    def check(self, offered: Mapping[str, TensorSpec], terms: UpdateTerms) -> None:
        """Raise `WeightMismatchError` unless `offered` fits."""
        unknown = [name for name in offered if name not in self.specs]
        missing = [] if terms.partial else self._missing(offered)
        misshapen: list[str] = []
        miscast: list[str] = []
        uncast: list[str] = []
        for name, spec in offered.items():
            own = self.specs.get(name)
            if own is None:
                continue
            if own.shape != spec.shape:
                misshapen.append(f"{name}: offered {spec}, the model has {own}")
            elif not castable(spec.dtype, own.dtype):
                miscast.append(f"{name}: offered {spec}, the model has {own}")
            elif spec.dtype != own.dtype and not terms.cast:
                uncast.append(f"{name}: offered {spec}, the model has {own}")
        faults = [
            ("unknown", unknown),
            ("missing", missing),
            ("misshapen", misshapen),
            ("of a dtype that can not be cast", miscast),
            ("of another dtype (send with dtype=, or receive with cast=True)", uncast),
        ]
        lines = [f"{len(names)} {what}: {', '.join(names)}" for what, names in faults if names]
        if not terms.partial and not offered:
            lines.insert(0, "the source offers no tensors")
        if lines:
            raise WeightMismatchError("weights do not fit the model, nothing was written; " + "; ".join(lines))

    def casts(self, offered: Mapping[str, TensorSpec]) -> list[str]:
        """Return `name: from -> to` for each offered tensor whose dtype is not the model's."""
        return [
            f"{name}: {dtype_name(spec.dtype)} -> {dtype_name(self.specs[name].dtype)}"
            for name, spec in offered.items()
            if spec.dtype != self.specs[name].dtype
        ]

    def _missing(self, offered: Mapping[str, TensorSpec]) -> list[str]:
        return [" or ".join(names) for names in self.ties if not any(name in offered for name in names)]


def check_name(name: str) -> None:
    """Raise `ValueError` for a name that neither a file nor a message can hold."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name {name!r} of a weight is not valid Unicode: {error.reason}") from error


def castable(offered: torch.dtype, own: torch.dtype) -> bool:
    """Return whether the dtypes are equal, or one floating dtype can become the other.

    Integers are never reinterpreted, nor is float8, which means nothing without its scale.
    """
    return offered == own or (_is_plain_float(offered) and _is_plain_float(own))


def live_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers themselves (not copies), tied names included."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _identity(tensor: Tensor) -> object:
    """Return a key that is equal for two names of one tensor: the same object, or the same view of one storage."""
    address = tensor.untyped_storage().data_ptr()
    if address == 0:
        return id(tensor)
    return (address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _is_plain_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
