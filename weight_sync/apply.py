"""Check an update as a whole, then write it in place: for sources that can be read twice.

Invariants
----------
* `prepare_update` writes nothing: it returns an update whose names, shapes, dtypes, ties and values
  (finite after the cast) have all been checked, or raises.
* `write` copies into the tensors the module already has; it allocates no parameter and never touches
  `requires_grad`, `.grad` or the training mode.
* "Nothing changed" is visible: `SyncReport.changed_tensors == 0`. Changed means changed bits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from samebit.weight_sync.digest import copy_scanned, digest_of, hexadecimal, scan
from samebit.weight_sync.folder_names import Place
from samebit.weight_sync.manifest import (
    Manifest,
    NonFiniteWeightError,
    UpdateTerms,
    WeightMismatchError,
    live_tensors,
)
from samebit.weight_sync.report import SyncReport, VerificationError
from samebit.weight_sync.source import TensorSource

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PreparedUpdate(Protocol):
    """Represents an update that fits the model. Nothing is written before `write`, which may be called only once."""

    @property
    def base_version(self) -> int | None:
        """Return the version of the weights that the update only changes; None for one that brings them."""

    def write(self, module: nn.Module, *, version: int, verify: bool = False) -> SyncReport: ...


@dataclass(frozen=True)
class SourceUpdate:
    """Represents a checked update, valid while its source is open."""

    base_version: ClassVar[None] = None
    source: TensorSource
    places: Mapping[str, Place]
    casts: tuple[str, ...]

    def write(self, module: nn.Module, *, version: int, verify: bool = False) -> SyncReport:
        began = time.monotonic()
        tensors = live_tensors(module)
        targets = {name: place.of(tensors[place.name]) for name, place in self.places.items()}
        digests: dict[str, int] = {}
        changed: dict[str, None] = {}
        for name, target in targets.items():
            copied = copy_scanned(self.source.load(name).to(target.dtype), target)
            digests[name] = copied.digest
            if copied.changed:
                changed[self.places[name].name] = None
        if verify:
            verify_digests(targets, digests)
        return SyncReport(
            version=version,
            tensors=len({place.name for place in self.places.values()}),
            bytes=sum(num_bytes(tensors[name]) for name in changed),
            seconds=time.monotonic() - began,
            changed=tuple(changed),
            casts=self.casts,
            digest=hexadecimal(digest_of(digests)),
            verified=verify,
            dense_bytes=sum(num_bytes(target) for target in targets.values()),
        )


def prepare_update(manifest: Manifest, source: TensorSource, terms: UpdateTerms) -> SourceUpdate:
    """Check everything that can be checked without writing."""
    offered = source.specs()
    places = manifest.fit(offered, terms)
    _check_values(manifest, source, places)
    _check_ties(manifest, source, places)
    return SourceUpdate(source, manifest.first_names(places), tuple(manifest.casts(offered, places)))


def verify_digests(targets: Mapping[str, Tensor], expected: Mapping[str, int]) -> None:
    """Read the tensors back; raise `VerificationError` with the names of those whose digest differs."""
    wrong = [name for name, digest in expected.items() if scan(targets[name]).digest != digest]
    if wrong:
        raise VerificationError(f"read back, these weights are not what was written: {', '.join(wrong)}")


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape hold the same bits (0.0 and -0.0 differ)."""
    if left.dtype.is_floating_point:
        as_integer = _INTEGER_OF_SIZE[left.element_size()]
        left, right = left.detach().view(as_integer), right.detach().view(as_integer)
    return torch.equal(left, right)


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity, or None."""
    return next((name for name, tensor in tensors.items() if not scan(tensor).finite), None)


def _check_values(manifest: Manifest, source: TensorSource, places: Mapping[str, Place]) -> None:
    dtypes = {name: manifest.specs[place.name].dtype for name, place in places.items()}
    bad = [name for name, dtype in dtypes.items() if not scan(source.load(name).to(dtype)).finite]
    if bad:
        raise NonFiniteWeightError(
            "NaN or infinity in the offered weights (after the cast to the model's dtype), nothing "
            f"was written: {', '.join(bad)}"
        )


def _check_ties(manifest: Manifest, source: TensorSource, places: Mapping[str, Place]) -> None:
    conflicts: list[str] = []
    offered = {place.name: name for name, place in places.items() if place.is_whole}
    for group in manifest.ties:
        given = [offered[name] for name in group if name in offered]
        for other in given[1:]:
            dtype = manifest.specs[group[0]].dtype
            if not same_bits(source.load(given[0]).to(dtype), source.load(other).to(dtype)):
                conflicts.append(f"{given[0]} and {other}")
    if conflicts:
        raise WeightMismatchError(
            "tied weights were offered with different values, nothing was written: " + ", ".join(conflicts)
        )
