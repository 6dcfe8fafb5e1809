"""Checking an update as a whole, then writing it in place.

Invariants
----------
* `prepare_update` writes nothing: it returns an update whose names, shapes, dtypes, ties and values
  (finite after the cast) have all been checked, or raises.
* `PreparedUpdate.write` copies into the tensors the module already has; it allocates no parameter and
  never touches `requires_grad`, `.grad` or the training mode.
* "Nothing changed" is visible: `SyncReport.changed_tensors == 0`. Changed means changed bits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from samebit.weight_sync.manifest import (
    Manifest,
    NonFiniteWeightError,
    WeightMismatchError,
    live_tensors,
)
from samebit.weight_sync.source import TensorSource, open_source

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class SyncReport:
    """What an update did. `bytes` counts the bytes written; `changed` names tensors whose bits moved."""

    version: int
    tensors: int
    bytes: int
    seconds: float
    changed: tuple[str, ...]
    casts: tuple[str, ...]

    @property
    def changed_tensors(self) -> int:
        return len(self.changed)


@dataclass(frozen=True)
class PreparedUpdate:
    """A checked update. Valid while its source is open."""

    source: TensorSource
    names: tuple[str, ...]
    casts: tuple[str, ...]

    def write(self, module: nn.Module, *, version: int) -> SyncReport:
        began = time.monotonic()
        written = 0
        changed: list[str] = []
        targets = live_tensors(module)
        with torch.no_grad():
            for name in self.names:
                target = targets[name]
                value = self.source.load(name).to(target.dtype)
                if same_bits(target, value):
                    continue
                target.copy_(value)
                written += value.numel() * value.element_size()
                changed.append(name)
        seconds = time.monotonic() - began
        return SyncReport(version, len(self.names), written, seconds, tuple(changed), self.casts)


def prepare_update(manifest: Manifest, source: TensorSource, *, partial: bool) -> PreparedUpdate:
    """Check everything that can be checked without writing."""
    offered = source.specs()
    manifest.check(offered, partial=partial)
    _check_values(manifest, source, offered)
    names = _one_name_per_tie(manifest, offered)
    _check_ties(manifest, source, offered)
    return PreparedUpdate(source, names, tuple(manifest.casts(offered)))


def apply_weights(
    module: nn.Module,
    source: object,
    *,
    partial: bool = False,
    version: int = 0,
    manifest: Manifest | None = None,
) -> SyncReport:
    """Check `source` against `module`, then copy it in. Raises before the first byte, or not at all."""
    manifest = manifest or Manifest.of(module)
    with open_source(source) as opened:
        return prepare_update(manifest, opened, partial=partial).write(module, version=version)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits (0.0 and -0.0 differ)."""
    if left.dtype.is_floating_point:
        as_integer = _INTEGER_OF_SIZE[left.element_size()]
        left, right = left.detach().view(as_integer), right.detach().view(as_integer)
    return torch.equal(left, right)


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a floating tensor with NaN or infinity in it, if there is one."""
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor.detach()).all()):
            return name
    return None


def _check_values(manifest: Manifest, source: TensorSource, offered: Mapping[str, object]) -> None:
    bad = [
        name
        for name in offered
        if first_non_finite({name: source.load(name).to(manifest.specs[name].dtype)}) is not None
    ]
    if bad:
        raise NonFiniteWeightError(
            "NaN or infinity in the offered weights (after the cast to the model's dtype), nothing "
            f"was written: {', '.join(bad)}"
        )


def _check_ties(manifest: Manifest, source: TensorSource, offered: Mapping[str, object]) -> None:
    conflicts: list[str] = []
    for group in manifest.ties:
        given = [name for name in group if name in offered]
        for other in given[1:]:
            dtype = manifest.specs[given[0]].dtype
            if not same_bits(source.load(given[0]).to(dtype), source.load(other).to(dtype)):
                conflicts.append(f"{given[0]} and {other}")
    if conflicts:
        raise WeightMismatchError(
            "tied weights were offered with different values, nothing was written: " + ", ".join(conflicts)
        )


def _one_name_per_tie(manifest: Manifest, offered: Mapping[str, object]) -> tuple[str, ...]:
    chosen = [next((n for n in group if n in offered), None) for group in manifest.ties]
    return tuple(name for name in chosen if name is not None)
