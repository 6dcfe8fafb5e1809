"""From a model folder or a module to what the worker serves; every refusal names its cause.

Invariants
----------
* A folder is read locally and without pickle; weights that the checkpoint lacks are an error, never a
  random initialisation.
* A module is taken as it is: no copy, no `train()`/`eval()`, no change of dtype or device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from samebit.rollout.config import RolloutConfig
from samebit.rollout.errors import ModelLoadError
from samebit.rollout.stopping import Tokenizer, as_token_ids
from samebit.weight_sync.apply import first_non_finite
from samebit.weight_sync.manifest import live_tensors

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class LoadedModel:
    module: PreTrainedModel
    shared: bool
    tokenizer: Tokenizer | None
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def load_model(
    model: str | Path | nn.Module,
    config: RolloutConfig,
    tokenizer: Tokenizer | None,
    *,
    unlimited_len: int | None = None,
) -> LoadedModel:
    """`unlimited_len`: the length of a model whose config knows no limit (pure Mamba), without which that raises."""
    if isinstance(model, str | Path):
        folder = Path(model)
        module = _from_folder(folder, config)
        if tokenizer is None and any((folder / name).is_file() for name in TOKENIZER_FILES):
            tokenizer = cast(Tokenizer, AutoTokenizer.from_pretrained(folder, local_files_only=True))
    elif isinstance(model, PreTrainedModel):
        module = model
        _check_asked_dtype(module, config)
    else:
        raise ModelLoadError(
            "the model must be a folder or a Hugging Face causal language model (a PreTrainedModel), got "
            f"{type(model).__name__}"
        )
    _check_tensors(module, config)
    return LoadedModel(
        module=module,
        shared=isinstance(model, nn.Module),
        tokenizer=tokenizer,
        max_model_len=_max_model_len(module, config, unlimited_len),
        eos_token_ids=_eos_token_ids(module),
    )


def _from_folder(folder: Path, config: RolloutConfig) -> PreTrainedModel:
    if not folder.is_dir():
        raise ModelLoadError(f"no such model folder: {folder}")
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise ModelLoadError(f"{folder} has no weights (*.safetensors; pickled weights are not read)")
    dtype: torch.dtype | str = config.torch_dtype() or "auto"
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, dtype=dtype, output_loading_info=True
    )
    module, info = cast(tuple[nn.Module, dict[str, Any]], loaded)
    if info["missing_keys"]:
        raise ModelLoadError(
            f"the weights in {folder} lack {len(info['missing_keys'])} tensors: "
            f"{', '.join(sorted(info['missing_keys']))}"
        )
    if info["unexpected_keys"]:
        logger.warning(
            "%s holds tensors that the model has no place for: %s",
            folder,
            ", ".join(sorted(info["unexpected_keys"])),
        )
    bad = first_non_finite(live_tensors(module))
    if bad is not None:
        raise ModelLoadError(f"{bad} in {folder} holds NaN or infinity")
    if not isinstance(module, PreTrainedModel):
        raise ModelLoadError(f"{folder} does not hold a causal language model")
    cast(nn.Module, module).to(config.device)
    return module


def _check_asked_dtype(module: nn.Module, config: RolloutConfig) -> None:
    asked = config.torch_dtype()
    if asked is None:
        return
    for name, parameter in module.named_parameters():
        if parameter.dtype != asked:
            raise ModelLoadError(
                f"dtype={config.dtype!r} was asked for, but the module's {name} is {parameter.dtype}; a module "
                "is served as it is: convert it yourself or leave dtype out"
            )


def _check_tensors(module: nn.Module, config: RolloutConfig) -> None:
    allowed = config.allowed_dtypes()
    for name, tensor in live_tensors(module).items():
        if _is_dtensor(tensor):
            raise ModelLoadError(f"{name} is a DTensor; a sharded module can not be served in place")
        if tensor.device.type != config.device:
            raise ModelLoadError(f"{name} is on {tensor.device}, but RolloutConfig(device={config.device!r})")
        if tensor.dtype.is_floating_point and tensor.dtype not in allowed.values():
            raise ModelLoadError(
                f"{name} is {tensor.dtype}; supported on {config.device} are {', '.join(allowed)}: pass "
                "RolloutConfig(dtype=...)"
            )


def _is_dtensor(tensor: torch.Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _max_model_len(module: PreTrainedModel, config: RolloutConfig, unlimited_len: int | None) -> int:
    text_config = module.config.get_text_config()
    if not hasattr(text_config, "max_position_embeddings"):
        length = config.max_model_len or unlimited_len
        if length is None:
            raise ModelLoadError("the model's config has no max_position_embeddings: give max_model_len")
        return length
    limit = int(text_config.max_position_embeddings)
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ModelLoadError(f"max_model_len={config.max_model_len} is more than the model's {limit} positions")
    return config.max_model_len


def _eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    """From the generation config, which is where a chat model lists all of its end tokens."""
    generation = module.generation_config
    if generation is not None and generation.eos_token_id is not None:
        return as_token_ids(generation.eos_token_id)
    return as_token_ids(module.config.get_text_config().eos_token_id)
