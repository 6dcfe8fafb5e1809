"""Build a model from its folder without transformers' reading: the weights go straight to where they belong.

For folders that do not hold the model's tensors as they are: each expert apart, quantized, or with vision around the
text model, whose names transformers does not know then; and for models that compute images, of whose vision nothing
may be missing. transformers would put a layer together in memory first, take
experts numbered 0, 1, 3, 4 for four in a row, and not name a piece that is missing. And for those of models whose
routers have corrections, which transformers rounds in some (Kimi-Linear).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from samebit.kernels.binding.experts.plan import CORRECTIONS
from samebit.rollout.models.kinds import ModelKind
from samebit.weight_sync import Manifest, TensorSpec, open_source
from samebit.weight_sync.manifest import UpdateTerms, float32_names, live_tensors
from samebit.weight_sync.opened_update import open_update
from samebit.weight_sync.quantized import quantization_of


def holds_other_tensors(folder: Path, kind: ModelKind) -> bool:
    """Tell whether the folder holds its model's tensors in parts, or quantized, or with vision around them, or
    corrections of routers; or the tensors of vision are the model's."""
    if kind.whole or quantization_of(folder) is not None:
        return True
    manifest = _manifest(_config(folder, kind), kind)
    places = {name: place for name in _stored(folder) if (place := manifest.place(name)) is not None}
    inside = manifest.names.with_vision and any(place.name != name for name, place in places.items())
    return inside or any(place.expert is not None or place.name.endswith(CORRECTIONS) for place in places.values())


def read_folder(folder: Path, kind: ModelKind, dtype: torch.dtype | None, *, dequantize: bool) -> PreTrainedModel:
    """Return the folder's model in `dtype`; None takes that of its config, or else of its files.

    Raises:
        WeightMismatchError: a tensor that is missing, doubled, unknown or misshapen, by name.
        WeightSourceError: a file that can not be read; quantized weights, unless `dequantize`.
        NonFiniteWeightError: NaN or infinity.
    """
    config = _config(folder, kind)
    config.dtype = dtype or config.dtype or _stored_dtype(folder)
    config.tie_word_embeddings = config.tie_word_embeddings and not _holds_untied(folder, _manifest(config, kind))
    with no_init_weights():
        module = kind.auto.from_config(config, dtype=config.dtype, trust_remote_code=False)
    module.tie_weights()
    _keep_float32(module)
    _fill(module, folder, UpdateTerms(cast=True, dequantize=dequantize), whole=kind.whole)
    if (folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    model: PreTrainedModel = module.eval()
    return model


def _fill(module: nn.Module, folder: Path, terms: UpdateTerms, *, whole: bool) -> None:
    """Write a folder's weights to a module. ``whole``: what text has no use for is the model's too."""
    manifest = Manifest.of(module)
    if whole:
        manifest = replace(manifest, names=manifest.names.leaving_out_none_of(manifest.specs))
    with open_update(folder, module, manifest, terms, version=0) as update:
        update.write(module, version=0)


def _config(folder: Path, kind: ModelKind) -> Any:
    """Return the folder's config without its quantization: the model is not quantized."""
    config = kind.read_config(folder)
    vars(config).pop("quantization_config", None)
    return config


def _manifest(config: Any, kind: ModelKind) -> Manifest:
    with torch.device("meta"):
        return Manifest.of(kind.auto.from_config(config, trust_remote_code=False))


def _holds_untied(folder: Path, manifest: Manifest) -> bool:
    """Tell whether a folder holds tied tensors, head and embedding, of different values. transformers then ties none,
    whatever the config says, as that of some models with vision does by default."""
    with open_source(folder) as source:
        names = {place.name: name for name in source.specs() if (place := manifest.place(name)) is not None}
        tied = [[names[one] for one in group if one in names] for group in manifest.ties]
        pairs = [(first, other) for first, *others in filter(None, tied) for other in others]
        return any(not torch.equal(source.load(first), source.load(other)) for first, other in pairs)


def _stored(folder: Path) -> dict[str, TensorSpec]:
    with open_source(folder) as source:
        return source.specs()


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of the first tensor that has a plain one; quantized weights become bfloat16."""
    found = (spec.dtype for spec in _stored(folder).values())
    return next((dtype for dtype in found if dtype.is_floating_point and dtype.itemsize > 1), torch.bfloat16)


def _keep_float32(module: nn.Module) -> None:
    """Make corrections float32, and what the model's class wants so, whatever the dtype of the rest."""
    asked = float32_names(module)
    for name, tensor in live_tensors(module).items():
        if name in asked or name.endswith(CORRECTIONS):
            tensor.data = tensor.data.float()
