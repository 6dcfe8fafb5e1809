"""Read an adapter in, from a dict, a folder in peft's format, a name of the hub, a module, a stream or a link.

Invariants
----------
* The tensors are checked as those of a model are: every one that the config promises, of its shape, finite; half an
  adapter is refused. Nothing is known of the adapter until all of it is there.
* Tensors may have the names of peft's files, of a peft model's state dict, or of the model inside it; with vision
  around the text model or without. Those of vision are left out; where the model computes images, only such as are
  without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import torch
from torch import nn

from samebit.kernels.binding import binding_of
from samebit.kernels.binding.lora.loaded import new_delta, tree_of
from samebit.kernels.binding.lora.plan import listed
from samebit.kernels.layout.lora.adapters import Adapter, Delta, new_number
from samebit.rollout.adapters.layout import config_of, layout_of
from samebit.rollout.adapters.registry import AdapterRegistry, Loaded
from samebit.rollout.errors import AdapterError
from samebit.rollout.models.hub import model_folder
from samebit.weight_sync import Manifest, SyncReport, UpdateTerms, open_update
from samebit.weight_sync.adapter_names import PREFIX, AdapterNames
from samebit.weight_sync.folder_names import ignored_names

IN_FLIGHT = ("finish", "abort")


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Says how an adapter is taken.

    config: a ``LoraConfig`` or a dict of its fields; None for that of the folder, or of the adapter of this name.
    revision: a branch, tag or commit of a source that is a name of the Hugging Face hub; None for its main branch.
    version: above that of the last adapter of this name; None for the next.
    autocast: matrices of less than float32 are widened, as peft does (``autocast_adapter_dtype``); False takes them in
        the model's dtype, for a trainer whose adapter has it.
    in_flight: what becomes of requests that go through the adapter before it: "finish" lets them end under it, "abort"
        ends them with what they have.
    number: stands for it in the names of its cached blocks, and is given to no other; None draws one. A fleet gives all
        replicas the same.
    alias: the name that results give, None for the adapter's own. A fleet's is that without the version.
    """

    config: object = None
    version: int | None = None
    autocast: bool = True
    in_flight: str = "finish"
    number: int | None = None
    revision: str | None = None
    alias: str | None = None

    def __post_init__(self) -> None:
        check_in_flight(self.in_flight)
        if self.version is not None and (isinstance(self.version, bool) or not isinstance(self.version, int)):
            raise AdapterError(f"version must be an int or None, got {self.version!r}")
        if not isinstance(self.autocast, bool):
            raise AdapterError(f"autocast must be True or False, got {self.autocast!r}")
        if not (self.revision is None or (isinstance(self.revision, str) and self.revision)):
            raise AdapterError(f"revision must be a branch, tag or commit, or None, got {self.revision!r}")
        if not (self.alias is None or (isinstance(self.alias, str) and self.alias)):
            raise AdapterError(f"alias must be a string that is not empty, or None, got {self.alias!r}")


class AdapterKeywords(TypedDict, total=False):
    """Names the keywords of `load_adapter`; see `AdapterOptions`."""

    config: object
    version: int | None
    autocast: bool
    in_flight: str
    number: int | None
    revision: str | None
    alias: str | None


def check_in_flight(in_flight: object) -> None:
    """Raise `AdapterError` unless this is one of `IN_FLIGHT`."""
    if in_flight not in IN_FLIGHT:
        raise AdapterError(f"in_flight must be one of {', '.join(IN_FLIGHT)}, got {in_flight!r}")


def read_adapter(
    name: str, source: object, options: AdapterOptions, module: nn.Module, known: AdapterRegistry
) -> tuple[Loaded, SyncReport]:
    """Return an adapter of a bound model, read from a source.

    Raises:
        AdapterError: a config, a version or a revision that will not do; a change of a tower that computes images.
        ModelLoadError: no such folder; or a name that is not known, or not to be reached.
        WeightMismatchError: a tensor that is missing, unknown or misshapen, by name.
        NonFiniteWeightError: NaN or infinity.
    """
    source = _resolved(source, options.revision)
    before = known.loaded(name)
    layout = None if before is None or options.config is not None else before.layout
    if options.config is None and isinstance(source, Path):
        layout = layout_of(config_of(source), module)
    if layout is None:
        if options.config is None:
            raise AdapterError(
                f"the adapter {name!r} is new, and nothing says which layers it changes: give config=, a LoraConfig"
            )
        layout = layout_of(options.config, module)
    version = _next_version(known.last_version(name), options.version)
    head = module.get_parameter("lm_head.weight")
    dtype = torch.float32 if options.autocast else head.dtype
    shapes = {**layout.shapes, **layout.of_images}
    deltas = {layer: new_delta(shape, dtype, head.device) for layer, shape in shapes.items()}
    sides = {f"{PREFIX}{layer}.lora_A": delta.down for layer, delta in deltas.items()}
    sides |= {f"{PREFIX}{layer}.lora_B": delta.up for layer, delta in deltas.items()}
    tree = tree_of(sides)
    names = AdapterNames(
        ignored=ignored_names(module),
        wrapped=binding_of(module).family.wrapped is not None,
        optional=frozenset(f"{PREFIX}{layer}.lora_{side}.weight" for layer in layout.of_images for side in "AB"),
    )
    manifest = replace(Manifest.of(tree), names=names)
    terms = UpdateTerms(cast=options.autocast)
    with open_update(source, tree, manifest, terms, version=version - 1) as update:
        report = update.write(tree, version=version)
    _check_images_stay(name, {layer: deltas.pop(layer) for layer in layout.of_images})
    number = new_number() if options.number is None else options.number
    return Loaded(Adapter(name, deltas, version=version, number=number, alias=options.alias), layout), report


def _resolved(source: object, revision: str | None) -> object:
    """Return the folder of a path or a name of the hub; other sources as they are."""
    if isinstance(source, str | Path):
        return model_folder(source, revision, what="adapter")
    if revision is not None:
        raise AdapterError(f"revision={revision!r} is for a name of the hub, got a {type(source).__name__}")
    return source


def _check_images_stay(name: str, deltas: Mapping[str, Delta]) -> None:
    """Check that an adapter changes no layer of a tower that computes images.

    Raises:
        AdapterError: it does, by name.
    """
    moved = [layer for layer, delta in deltas.items() if delta.down.weight.any() and delta.up.weight.any()]
    if moved:
        raise AdapterError(
            f"the adapter {name!r} changes {listed(moved)}, which images go through; allowed in a vision tower that "
            "computes images: adapters without effect (A or B all zero), or none (exclude_modules of its config)"
        )


def _next_version(last: int, asked: int | None) -> int:
    if asked is None:
        return last + 1
    if asked <= last:
        raise AdapterError(f"version must be above the adapter's current {last}, got {asked}")
    return asked
