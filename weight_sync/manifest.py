"""List what a model holds, by name, and find where each of an offered set of tensors goes in it.

Invariants
----------
* A manifest is data (names, shapes, dtypes, ties); it keeps no tensor alive and stays valid while the
  weights are asleep.
* `fit` looks at names, shapes and dtypes only, so it runs before the first byte is written. It either
  returns or raises one error that names *every* tensor at fault.
* Tied weights are one tensor with several names: offering any one of the names covers all of them.
* A tensor of several experts may come in parts; every part has to come, once.
* What text has no use for has no place, and is left out: here alone, so that every source is taken alike. Of a module
  that computes images, the vision tower is like the rest: it has to come, all of it, or it would stay an older one.
* A parameter that the model's class keeps in float32 may be offered in a narrower dtype: its forward widens it, as that
  of a trainer does that has it in that dtype.
* A buffer is never cast. A router's correction bias is float32 in every forward; one that went through bfloat16 on its
  way chooses other experts. Only from a folder may it be widened, which keeps every value: so transformers reads it,
  and with it the trainer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from samebit.weight_sync.folder_names import FolderNames, Place


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
    """Holds the terms of a receiver.

    partial: only some tensors will do; cast: so will other floating dtypes; dequantize: and weights that a folder holds
    quantized; widen_buffers: and buffers of a narrower dtype, whose values the model's holds too. other_arithmetic:
    weights of a sender whose GPU computes other bits are welcome.
    """

    partial: bool = False
    cast: bool = False
    dequantize: bool = False
    widen_buffers: bool = False
    other_arithmetic: bool = False


@dataclass(frozen=True)
class Manifest:
    """Lists the names, shapes and dtypes of a model's tensors.

    specs: every name of the model's. ties: the names that share one storage, first name first. buffers: the names that
    are no parameters. names: what folders call these tensors, and their parts. float32: the names that the class
    keeps so.
    """

    specs: dict[str, TensorSpec]
    ties: tuple[tuple[str, ...], ...]
    buffers: frozenset[str] = frozenset()
    names: FolderNames = field(default_factory=FolderNames)
    float32: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: nn.Module) -> Manifest:
        """Return the manifest of a module's parameters and persistent buffers."""
        tensors = live_tensors(module)
        return cls(
            {name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()},
            _ties(tensors),
            frozenset(name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)),
            FolderNames.of(module),
            float32_names(module),
        )

    def differences(self, module: nn.Module) -> list[str]:
        """Say of each tensor whose shape or dtype the module has changed what it was, and is; and of those whose values
        can not be read."""
        tensors = live_tensors(module)
        now = {name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()}
        others = [
            f"{name} was {spec}, and is {now.get(name, 'no tensor')}"
            for name, spec in self.specs.items()
            if now.get(name) != spec
        ]
        return others + [f"{name} {fault}" for name, tensor in tensors.items() if (fault := _without_values(tensor))]

    def with_ties_of(self, module: nn.Module) -> Manifest:
        """Return this with the ties that the module has now; with its own where names are gone (`differences`)."""
        tensors = live_tensors(module)
        if not self.specs.keys() <= tensors.keys():
            return self
        return replace(self, ties=_ties({name: tensors[name] for name in self.specs}))

    def place(self, name: str) -> Place | None:
        """Return where an offered tensor goes; None for one that has no place."""
        place = self.names.place(name, self.specs)
        if place is None or place.expert is None or place.expert < self.specs[place.name].shape[0]:
            return place
        return None

    def spec_at(self, place: Place) -> TensorSpec:
        """Return what the model has at a place, by the name of the whole tensor."""
        whole = self.specs[place.name]
        return TensorSpec(whole.name, place.shape(whole.shape), whole.dtype)

    def fit(self, offered: Mapping[str, TensorSpec], terms: UpdateTerms) -> dict[str, Place]:
        """Return where each offered tensor goes, without those that have no place and may be left out; raise
        `WeightMismatchError` unless all others fit."""
        found = {name: self.place(name) for name in offered}
        places = {name: place for name, place in found.items() if place is not None}
        unknown = [name for name, place in found.items() if place is None and not self.names.ignores(name)]
        faults = [
            ("unknown", unknown),
            ("given twice", _given_twice(places)),
            *self._missing_by_use([] if terms.partial else self._missing(places)),
        ]
        places = self._as_offered(offered, places)
        faults += self._unlike(offered, places, terms)
        lines = [f"{len(names)} {what}: {', '.join(names)}" for what, names in faults if names]
        if not terms.partial and not places and not unknown:
            lines.insert(0, "the source offers no tensors")
        if lines:
            raise WeightMismatchError("weights do not fit the model, nothing was written; " + "; ".join(lines))
        return places

    def casts(self, offered: Mapping[str, TensorSpec], places: Mapping[str, Place]) -> list[str]:
        """Return `name: from -> to` for each tensor of the model that is offered in another dtype than its own."""
        found = {
            f"{place.name}: {dtype_name(offered[name].dtype)} -> {dtype_name(self.specs[place.name].dtype)}": None
            for name, place in places.items()
            if offered[name].dtype != self.specs[place.name].dtype
        }
        return list(found)

    def first_names(self, places: Mapping[str, Place]) -> dict[str, Place]:
        """Return the places without those of tied tensors whose values come under an earlier name too."""
        given = {place.name: name for name, place in places.items() if place.is_whole}
        again = {given[name] for group in self.ties for name in [one for one in group if one in given][1:]}
        return {name: place for name, place in places.items() if name not in again}

    def knows_ties(self, ties: Mapping[str, str], places: Mapping[str, Place]) -> bool:
        """Return whether tensors that are one at the source (`ties`: from a later name to the first) are one here, or
        have no place."""
        first = {name: names[0] for names in self.ties for name in names}
        here = {name: replace(place, name=first[place.name]) for name, place in places.items()}
        return all(later not in here or here[later] == here.get(name) for later, name in ties.items())

    def every_spec(self) -> Iterator[TensorSpec]:
        """Yield the specs of all that can be offered: each tensor, whole and in parts."""
        for name, spec in self.specs.items():
            yield spec
            fusion = self.names.fusion_of(name)
            for place in () if fusion is None else fusion.places(name, spec.shape[0]):
                yield self.spec_at(place)

    def _missing(self, places: Mapping[str, Place]) -> list[str]:
        given = {place: name for name, place in places.items()}
        example = {place.name: name for name, place in places.items() if not place.is_whole}
        missing: list[str] = []
        for names in self.ties:
            parts = [name for name in names if name in example]
            if parts:
                missing += self._missing_parts(parts[0], example[parts[0]], given)
            elif not any(Place(name) in given or self.names.ignores(name) for name in names):
                missing.append(" or ".join(names))
        return missing

    def _missing_by_use(self, missing: list[str]) -> list[tuple[str, list[str]]]:
        """Return what is missing: of what text goes through, and of what only images do."""
        of_images = [name for name in missing if self.names.computes_images_with(name)]
        return [
            ("missing", [name for name in missing if name not in of_images]),
            (
                "missing of the vision tower, with which this model computes images (send them too, or with "
                "partial=True leave the tower as it is)",
                of_images,
            ),
        ]

    def _missing_parts(self, name: str, example: str, given: Mapping[Place, str]) -> list[str]:
        """Return the names of the parts that have not come, formed as that of one that has."""
        fusion, place = self.names.fusion_of(name), self.place(example)
        if fusion is None or place is None:
            return []
        prefix = example.removesuffix(fusion.end(place))
        every = fusion.places(name, self.specs[name].shape[0])
        return [prefix + fusion.end(place) for place in every if place not in given]

    def _as_offered(self, offered: Mapping[str, TensorSpec], places: dict[str, Place]) -> dict[str, Place]:
        """Return the places with parts that stand behind each other where the offered sizes put them, if those fill the
        tensor: transformers 5.23 writes the parts in equal sizes. And with transposed tensors that come so: of some
        families transformers tells by the shape too."""
        parts: dict[str, list[str]] = {}
        for name, place in sorted(places.items(), key=lambda found: found[1].rows or (0, 0)):
            if place.rows is not None and offered[name].shape:
                parts.setdefault(place.name, []).append(name)
        moved: dict[str, Place] = {}
        for target, names in parts.items():
            stops = list(accumulate(offered[name].shape[0] for name in names))
            if stops[-1] == self.specs[target].shape[0]:
                starts = [0, *stops]
                moved |= {name: Place(target, rows=(starts[i], stops[i])) for i, name in enumerate(names)}
        for name, place in places.items():
            turned = replace(place, transposed=True)
            own, found = self.specs[place.name].shape, offered[name].shape
            if place.name.endswith(self.names.transposed) and place.is_whole and own != found == turned.shape(own):
                moved[name] = turned
        return {**places, **moved}

    def _unlike(
        self, offered: Mapping[str, TensorSpec], places: Mapping[str, Place], terms: UpdateTerms
    ) -> list[tuple[str, list[str]]]:
        """Return the tensors whose shape or dtype is not the model's, by what is wrong with them."""
        misshapen: list[str] = []
        miscast: list[str] = []
        rounded: list[str] = []
        uncast: list[str] = []
        for name, place in places.items():
            spec, own = offered[name], self.spec_at(place)
            said = f"{name}: offered {spec}, the model has {own}"
            if own.shape != spec.shape:
                misshapen.append(said)
            elif not castable(spec.dtype, own.dtype):
                miscast.append(said)
            elif spec.dtype == own.dtype:
                continue
            elif place.name in self.buffers:
                rounded += [] if terms.widen_buffers and _widens(spec.dtype, own.dtype) else [said]
            elif not (terms.cast or (place.name in self.float32 and _widens(spec.dtype, own.dtype))):
                uncast.append(said)
        return [
            ("misshapen", misshapen),
            ("of a dtype that can not be cast", miscast),
            ("of another dtype, and a buffer, which is never cast (send it as the trainer's forward uses it)", rounded),
            ("of another dtype (send with dtype=, or receive with cast=True)", uncast),
        ]


def _given_twice(places: Mapping[str, Place]) -> list[str]:
    """Return the tensors that come under two names, or whole and in parts."""
    found: list[str] = []
    taken: dict[Place, str] = {}
    first: dict[str, str] = {}
    for name, place in places.items():
        same = taken.get(place) or taken.get(place.whole)
        earlier = first.get(place.name) if place == place.whole else same
        if earlier is not None:
            found.append(f"{earlier} and {name} are both {place.name}")
        taken[place] = name
        first.setdefault(place.name, name)
    return found


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


def _widens(offered: torch.dtype, own: torch.dtype) -> bool:
    """Return whether a model's floating dtype holds every value of the one that is offered."""
    return torch.promote_types(offered, own) == own


def live_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers themselves (not copies), tied names included."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


_MADE_FLOAT32 = {"HunYuanMoEV1Gate": ("wg.weight",)}
"""Names, by class, the parameters that it makes float32 in a model of any dtype, and so are loaded."""


def float32_names(module: nn.Module) -> frozenset[str]:
    """Return the names of tensors that transformers keeps in float32 where it loads the model in a narrower dtype,
    because a class asks for that: the weights of some families' routers, since 5.24; or makes them so itself."""
    made = {
        f"{name}.{inside}"
        for name, part in module.named_modules()
        for base in type(part).__mro__  # FSDP2 makes a class of its own of what it shards
        for inside in _MADE_FLOAT32.get(base.__name__, ())
    }
    asked = {found for part in module.modules() for found in vars(part).get("_keep_in_fp32_modules_strict") or ()}
    patterns = [re.compile(one.replace("*", ".*")) for one in asked]
    names = live_tensors(module)
    return frozenset(name for name in names if name in made or any(pattern.search(name) for pattern in patterns))


def _without_values(tensor: Tensor) -> str:
    """Say why the values of a tensor can not be read where they lie; nothing if they can."""
    if tensor.is_meta:
        return "is on the device 'meta'"
    if tensor.layout is not torch.strided:
        return f"is {dtype_name(tensor.layout)}"
    return "has no memory: its storage was freed" if tensor.numel() and not tensor.data_ptr() else ""


def _ties(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(identity(tensor), []).append(name)
    return tuple(tuple(names) for names in groups.values())


def identity(tensor: Tensor) -> object:
    """Return a key that is equal for two names of one tensor: the same object, or the same view of one storage."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    address = tensor.untyped_storage().data_ptr()
    if address == 0:
        return id(tensor)
    return (address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _is_plain_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def dtype_name(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")
