"""Find where a tensor of a folder's saved weights goes in the module: to which tensor, and to which part of it.

Hugging Face renames some on the way in (Nemotron-H's `backbone.` is `model.` in the module), and it merges: a
folder holds the matrices of each expert apart (`mlp.experts.7.gate_proj.weight`), the module those of all experts
of a layer in one tensor. Others it puts one behind the other (OLMo-hybrid's convolutions of q, k and v). Its own
tables are read here, but nothing is merged: a matrix has a place in the module's tensor, which it is written to.

Invariants
----------
* A name that the module knows stays, whatever the tables say.
* A converter of another kind than "stack the experts, then put gate and up behind each other", or "put convolutions
  behind each other", gives no place.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

_PLAIN = re.compile(r"[\w.]*\.\*\.[\w.]*")
_NUMBER = r"(\d{1,9})"

_WRAPPED = ".base_layer."
"""Stands in the names of layers that peft wraps."""

_FREQUENCIES = "rotary_emb.inv_freq"

_OF_TEXT = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")
_VISION = r"visual|vision_tower|multi_modal_projector|audio_tower|embed_vision|embed_audio|vision_embedder"
_OF_VISION = rf"^(model\.)?(({_VISION})\.|image_newline$)"
"""Begin the names that a model with vision has for its text model and for its other modules, and had before
transformers 4.52, when the text model had its head with it."""

_TRANSPOSED = ("qwen3_moe", "qwen3_vl_moe_text")
_GEMMAS = ("gemma3_text", "gemma4_text", "gemma4_unified_text")
_QWENS = ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3", "qwen3_vl_text", *_TRANSPOSED)
_GLMS = ("glm4", "glm4v_text", "glm4_moe", "glm4v_moe_text")
_INSIDE = (*_GEMMAS, "mistral", "ministral3", "llama", "gpt_oss", "lfm2", *_QWENS, *_GLMS)
"""Lists the types of text models that transformers also wraps with vision, without a rule that leads from one's names
to the other's, and those of them whose folders may have the experts' weights with inputs before outputs."""

_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")

_CONVOLUTION, _PROJECTION = "_conv1d.weight", "_proj.weight"
"""A convolution that a folder holds apart has as many channels as the projection of the same name has outputs."""


@dataclass(frozen=True)
class Place:
    """Names a tensor of the module; or, with an expert's number, one of the `parts` of that expert's rows in it; or its
    rows from the first of `rows` up to the second. ``transposed``: what comes has its last two axes the other way."""

    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1
    rows: tuple[int, int] | None = None
    transposed: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether this is all of the tensor."""
        return self.expert is None and self.rows is None

    @property
    def whole(self) -> Place:
        """Return the place of the tensor that this is a part of."""
        return Place(self.name)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what goes here, given that of the module's tensor."""
        if self.transposed:
            return (*whole[:-2], whole[-1], whole[-2])
        if self.rows is not None:
            return (self.rows[1] - self.rows[0], *whole[1:])
        return whole if self.expert is None else (whole[1] // self.parts, *whole[2:])

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of the module's tensor: a view, to be written to."""
        if self.transposed:
            return tensor.detach().transpose(-1, -2)
        if self.rows is not None:
            return tensor.detach()[slice(*self.rows)]
        if self.expert is None:
            return tensor
        expert = tensor.detach()[self.expert]
        rows = expert.shape[0] // self.parts
        return expert[self.part * rows : (self.part + 1) * rows]


@dataclass(frozen=True)
class Fusion:
    """Says how a folder holds one tensor: the end of its name, and those of its parts, "*" the expert."""

    target: str
    sources: tuple[str, ...]

    def place(self, name: str) -> Place | None:
        """Return the place of a part; None for any other tensor."""
        for part, source in enumerate(self.sources):
            before, after = source.split("*")
            found = re.fullmatch(f"(.*){re.escape(before)}{_NUMBER}{re.escape(after)}", name)
            if found:
                return Place(found[1] + self.target, int(found[2]), part, len(self.sources))
        return None

    def end(self, place: Place) -> str:
        """Return the end of the name of a part."""
        return self.sources[place.part].replace("*", str(place.expert))

    def places(self, name: str, experts: int) -> Iterator[Place]:
        """Yield the places of all parts of a tensor."""
        for expert in range(experts):
            for part in range(len(self.sources)):
                yield Place(name, expert, part, len(self.sources))


@dataclass(frozen=True)
class Joining:
    """Says how a folder holds one tensor in parts that stand behind each other in it: the ends of their names, and
    their rows."""

    target: str
    sources: tuple[str, ...]
    rows: tuple[tuple[int, int], ...]

    def place(self, name: str) -> Place | None:
        """Return the place of a part; None for any other tensor."""
        for source, rows in zip(self.sources, self.rows, strict=True):
            if name.endswith(source):
                return Place(name.removesuffix(source) + self.target, rows=rows)
        return None

    def end(self, place: Place) -> str:
        """Return the end of the name of a part."""
        return next(source for source, rows in zip(self.sources, self.rows, strict=True) if rows == place.rows)

    def places(self, name: str, size: int) -> Iterator[Place]:
        """Yield the places of all parts of a tensor."""
        for rows in self.rows:
            yield Place(name, rows=rows)


@dataclass(frozen=True)
class FolderNames:
    """Knows the names that saved weights have for a module's tensors; without rules, those of the module alone.

    ignored: what text has no use for, as regular expressions (vision, layers that only a draft model has).
    of_images: what of that the module computes images with, and so is not ignored.
    with_vision: names may be those of a model with vision around the module's.
    transposed: ends of the names of tensors that may come with their last two axes the other way.
    """

    renamings: tuple[WeightRenaming, ...] = field(default=(), compare=False)
    fusions: tuple[Fusion | Joining, ...] = ()
    ignored: tuple[str, ...] = ()
    of_images: tuple[str, ...] = ()
    with_vision: bool = False
    transposed: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> FolderNames:
        if not isinstance(module, PreTrainedModel):
            return cls()
        rules = get_model_conversion_mapping(module)
        ignored, of_images = _unread_by_text(module)
        return cls(
            tuple(rule for rule in rules if isinstance(rule, WeightRenaming)),
            (
                *(_fusion(rule) for rule in rules if isinstance(rule, WeightConverter) and _stacks_experts(rule)),
                *(
                    joining
                    for rule in rules
                    if isinstance(rule, WeightConverter) and _joins_convolutions(rule)
                    for joining in _joinings(rule, module)
                ),
            ),
            ignored,
            of_images,
            module.config.model_type in _INSIDE,
            _EXPERTS if module.config.get_text_config().model_type in _TRANSPOSED else (),
        )

    @classmethod
    def by_use(cls, module: nn.Module) -> FolderNames:
        """Return what is known of a module's own tensors: those that it has no use for, and those of images."""
        ignored, of_images = _unread_by_text(module) if isinstance(module, PreTrainedModel) else ((), ())
        return cls(ignored=ignored, of_images=of_images)

    @classmethod
    def offered_by(cls, module: nn.Module) -> FolderNames:
        """Return the same of a module that sends: of one that is not bound, all that it holds may be of use for images
        where it arrives."""
        names = cls.by_use(module)
        if isinstance(vars(module).get("samebit"), _Bound):
            return names
        held = tuple(one for one in _matching(names.ignored, module) if re.escape(_FREQUENCIES) not in one)
        return replace(names, ignored=tuple(one for one in names.ignored if one not in held), of_images=held)

    def place(self, name: str, known: Container[str]) -> Place | None:
        """Return where a tensor goes, `known` being the names of the module; None for one that has no place."""
        if name in known:
            return Place(name)
        alone = _without_vision(name) if self.with_vision else name
        renamed: str = rename_source_key(alone, list(self.renamings), [])[0]
        found = (fusion.place(renamed) for fusion in self.fusions)
        place = next((place for place in found if place is not None), Place(renamed))
        return place if place.name in known else None

    def ignores(self, name: str) -> bool:
        """Tell whether a tensor that has no place may be left out."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def leaving_out_none_of(self, own: Iterable[str]) -> FolderNames:
        """Return what is known where nothing may be left out that is like one of a module's own tensors."""
        names = list(own)
        kept = (one for one in self.ignored if not any(re.search(one, name) for name in names))
        return replace(self, ignored=tuple(kept))

    def computes_images_with(self, name: str) -> bool:
        """Tell whether a tensor is one that images go through, and no text."""
        return any(re.search(pattern, name) for pattern in self.of_images)

    def fusion_of(self, name: str) -> Fusion | Joining | None:
        """Return how a folder may hold a tensor of the module in parts."""
        return next((fusion for fusion in self.fusions if name.endswith(fusion.target)), None)


def ignored_names(module: nn.Module) -> tuple[str, ...]:
    """Return what the module has no use for, in itself or in its saved weights, as regular expressions.

    That is what the module's class says, and, where it wraps a text model, what the class of that says; the layers
    behind the last that the config announces for drafting; and the frequencies that older versions of transformers
    saved in each layer, which the model computes. What images go through is not, where the module computes them.
    """
    return FolderNames.by_use(module).ignored


@runtime_checkable
class _Bound(Protocol):
    """Names what is read here of what `samebit.kernels.bind` leaves at a model."""

    images: object


def _computes_images(module: PreTrainedModel) -> bool:
    """Return whether a module is bound to compute images, too."""
    bound = vars(module).get("samebit")
    return isinstance(bound, _Bound) and bound.images is not None


def _unread_by_text(module: PreTrainedModel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what text has no use for, as regular expressions: what may be left out, and what of the module's own it
    computes images with."""
    text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(module.config), type(module))
    found = [*(module._keys_to_ignore_on_load_unexpected or ()), *(text_class._keys_to_ignore_on_load_unexpected or ())]
    config = module.config.get_text_config().to_dict()
    found += [_OF_VISION] if config["model_type"] in _INSIDE else []
    for layer in range(config.get("num_nextn_predict_layers") or 0):
        found.append(rf"^model\.(language_model\.)?layers\.{config['num_hidden_layers'] + layer}\.")
    if any(name.endswith(_FREQUENCIES) for name, _ in module.named_buffers()):
        found.append(rf"(^|\.){re.escape(_FREQUENCIES)}$")
    patterns = tuple(dict.fromkeys(found))
    if not _computes_images(module):
        return patterns, ()
    of_images = _matching(patterns, module)
    return tuple(pattern for pattern in patterns if pattern not in of_images), of_images


def _matching(patterns: Iterable[str], module: nn.Module) -> tuple[str, ...]:
    """Return which of these a module has tensors of."""
    own = module.state_dict(keep_vars=True)
    return tuple(pattern for pattern in patterns if any(re.search(pattern, name) for name in own))


def _without_vision(name: str) -> str:
    """Return the name that a tensor has without vision around the text model: its own where there is none."""
    end = _OF_TEXT.sub("", name)
    return name if end == name else end if end.startswith("lm_head.") else f"model.{end}"


def _stacks_experts(rule: WeightConverter) -> bool:
    """Tell whether a rule makes `[experts, rows, ...]` of one matrix an expert, or of several behind each other."""
    stack, *behind = rule.operations
    joined = all(isinstance(one, Concatenate) and one.dim == 1 for one in behind) and len(behind) < 2
    stacked = isinstance(stack, MergeModulelist) and stack.dim == 0
    plain = all(_PLAIN.fullmatch(_spelt(source)) for source in rule.source_patterns)
    return stacked and joined and plain and len(rule.target_patterns) == 1


def _joins_convolutions(rule: WeightConverter) -> bool:
    """Tell whether a rule puts several convolutions behind each other."""
    first, *others = rule.operations
    joined = isinstance(first, Concatenate) and first.dim == 0 and not others and len(rule.target_patterns) == 1
    return joined and all(re.fullmatch(rf"[\w.]+{_CONVOLUTION}", source) for source in rule.source_patterns)


def _joinings(rule: WeightConverter, module: nn.Module) -> Iterator[Joining]:
    """Yield what a rule says of a module: nothing where the module has no such convolutions, which are all alike."""
    target = rule.target_patterns[0]
    sizes = {name.replace(_WRAPPED, "."): len(tensor) for name, tensor in module.named_parameters()}
    # The projections of the same layer: others, such as those of attention, may have the same names and other sizes.
    for layer in [name.removesuffix(target) for name in sizes if name.endswith(target)][:1]:
        ends = [source.removesuffix(_CONVOLUTION) + _PROJECTION for source in rule.source_patterns]
        stops = [0, *accumulate(sizes[layer + end] for end in ends)]
        yield Joining(target, tuple(rule.source_patterns), tuple(pairwise(stops)))


def _fusion(rule: WeightConverter) -> Fusion:
    return Fusion(_spelt(rule.target_patterns[0]), tuple(map(_spelt, rule.source_patterns)))


def _spelt(pattern: str) -> str:
    """Return a pattern with its escaped dots as they are in names."""
    return pattern.replace(r"\.", ".")
