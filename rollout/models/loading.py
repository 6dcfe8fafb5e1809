"""Load what the worker serves from a model folder or a module; every refusal names its cause.

Invariants
----------
* A folder is read locally and without pickle; weights that the folder lacks are an error, never a
  random initialisation. A name of the hub becomes a folder first (`hub`).
* Whatever is wrong with a folder, the error is a `ModelLoadError` that names it, or a `BindingError`.
* A module is taken as it is: no copy, no `train()`/`eval()`, no change of dtype or device.
* One thread at a time reads a folder: meanwhile transformers has other functions in its classes (`tie_weights`) and
  another default dtype in torch, and two that overlap would leave these behind.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from samebit.kernels import BindingError
from samebit.kernels.binding.families.inexact import exact_positions
from samebit.kernels.binding.lora.peft_model import inner_model
from samebit.rollout.checks import as_int
from samebit.rollout.config import RolloutConfig
from samebit.rollout.errors import ModelLoadError
from samebit.rollout.models.hub import model_folder
from samebit.rollout.models.kinds import ModelKind
from samebit.rollout.models.own_reading import holds_other_tensors, read_folder
from samebit.rollout.models.text_config import read_text_config
from samebit.rollout.requests.stopping import as_token_ids
from samebit.weight_sync.apply import first_non_finite
from samebit.weight_sync.folder_names import FolderNames
from samebit.weight_sync.manifest import float32_names, live_tensors

_READING = threading.Lock()


@dataclass(frozen=True)
class LoadedModel:
    """Holds what a worker is built on. shared: the module is the trainer's own."""

    module: PreTrainedModel
    shared: bool
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def load_model(
    model: str | Path | nn.Module,
    config: RolloutConfig,
    *,
    unlimited_len: int | None = None,
) -> LoadedModel:
    """Load a folder or take a module. `unlimited_len`: for a config without a limit (pure Mamba), which else raises."""
    if isinstance(model, str | Path):
        folder = model_folder(model, config.revision)
        with naming(folder):
            return _facts(_from_folder(folder, config), False, config, unlimited_len)
    if config.revision is not None:
        raise ModelLoadError(
            f"revision={config.revision!r} is for a name of the Hugging Face hub, and this is a module"
        )
    if config.dequantize:
        raise ModelLoadError("dequantize=True is for the weights of a folder, and this is a module")
    inner = inner_model(model)
    if isinstance(inner, PreTrainedModel) and isinstance(inner, GenerationMixin):
        module = inner
        _check_asked_dtype(module, config)
    else:
        raise ModelLoadError(
            "the model must be a folder, a name of the Hugging Face hub or a Hugging Face causal language model "
            "(a PreTrainedModel, or a PeftModel with one inside), got "
            f"{type(inner).__name__}"
        )
    return _facts(module, True, config, unlimited_len)


@contextmanager
def naming(model: object) -> Iterator[None]:
    """Name what could not be loaded. Boundary: a folder that is damaged makes transformers, and what it calls, raise
    errors of any kind.

    They become one that says what could not be loaded. Those of a module's code are left as they are.
    """
    try:
        yield
    except (ModelLoadError, BindingError, MemoryError):
        raise
    except Exception as error:
        if not isinstance(model, str | Path):
            raise
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"{model} can not be loaded: {type(error).__name__}: {reason}") from error


def position_limit(model: str | Path, revision: str | None) -> int | None:
    """Return how many positions the model of a folder, or of a name, has; None where its config has no limit."""
    folder = model_folder(model, revision)
    with naming(folder):
        _check_config(folder)
        return _positions(read_text_config(folder))


def _facts(
    module: PreTrainedModel,
    shared: bool,
    config: RolloutConfig,
    unlimited_len: int | None,
) -> LoadedModel:
    _check_tensors(module, config)
    return LoadedModel(
        module=module,
        shared=shared,
        max_model_len=_max_model_len(module, config, unlimited_len),
        eos_token_ids=_eos_token_ids(module),
    )


def _from_folder(folder: Path, config: RolloutConfig) -> PreTrainedModel:
    _check_config(folder)
    _check_generation_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise ModelLoadError(f"{folder} has no weights (*.safetensors; pickled weights are not read)")
    with _READING:
        kind = ModelKind.of(config.images)
        if holds_other_tensors(folder, kind):
            module = read_folder(folder, kind, config.torch_dtype(), dequantize=config.dequantize)
        else:
            module = _from_pretrained(folder, config.torch_dtype() or "auto")
    cast(nn.Module, module).to(config.device)
    return module


def _check_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json: it is not a Hugging Face model folder")


def _check_generation_config(folder: Path) -> None:
    """Check that generation_config.json can be read: otherwise transformers takes defaults, without end tokens.

    Raises:
        ModelLoadError: it can not.
    """
    path = folder / GENERATION_CONFIG_NAME
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} can not be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} must hold an object, and holds a {type(found).__name__}")


def _from_pretrained(folder: Path, dtype: torch.dtype | str) -> PreTrainedModel:
    loaded = AutoModelForCausalLM.from_pretrained(
        folder,
        config=read_text_config(folder),
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=dtype,
        ignore_mismatched_sizes=True,  # refused below, by name
        output_loading_info=True,
    )
    module, info = cast(tuple[nn.Module, dict[str, Any]], loaded)
    if info["missing_keys"]:
        raise ModelLoadError(
            f"the weights in {folder} lack {len(info['missing_keys'])} tensors: "
            f"{', '.join(sorted(info['missing_keys']))}"
        )
    if info["mismatched_keys"]:
        sizes = [f"{name} {list(found)}, the model {list(own)}" for name, found, own in sorted(info["mismatched_keys"])]
        raise ModelLoadError(f"tensors in {folder} have other shapes than the model's: {'; '.join(sizes)}")
    names = FolderNames.of(module)
    unknown = [name for name in info["unexpected_keys"] if not names.ignores(name)]
    if unknown:
        raise ModelLoadError(
            f"{folder} holds {len(unknown)} tensors that the model has no place for: {', '.join(sorted(unknown))}"
        )
    bad = first_non_finite(live_tensors(module))
    if bad is not None:
        raise ModelLoadError(f"{bad} in {folder} holds NaN or infinity")
    if not isinstance(module, PreTrainedModel):
        raise ModelLoadError(f"{folder} does not hold a causal language model")
    return module


def _check_asked_dtype(module: nn.Module, config: RolloutConfig) -> None:
    asked = config.torch_dtype()
    if asked is None:
        return
    kept = float32_names(module)
    for name, parameter in module.named_parameters():
        of_adapter = ".lora_A." in name or ".lora_B." in name  # peft keeps these in float32
        as_loaded = name in kept and parameter.dtype is torch.float32
        if parameter.dtype != asked and not (of_adapter or as_loaded):
            raise ModelLoadError(
                f"dtype={config.dtype!r} was asked for, but the module's {name} is {parameter.dtype}; a module "
                "is served as it is: convert it yourself or leave dtype out"
            )


def _check_tensors(module: nn.Module, config: RolloutConfig) -> None:
    allowed = config.allowed_dtypes()
    tensors = live_tensors(module)
    first = next(iter(tensors.items()), None)
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            raise ModelLoadError(f"{name} is a DTensor; a sharded module can not be served in place")
        if tensor.device.type != config.device:
            raise ModelLoadError(f"{name} is on {tensor.device}, but RolloutConfig(device={config.device!r})")
        if first is not None and tensor.device != first[1].device:
            raise ModelLoadError(f"{name} is on {tensor.device}, {first[0]} on {first[1].device}: a worker has one GPU")
        if tensor.dtype.is_floating_point and tensor.dtype not in allowed.values():
            raise ModelLoadError(
                f"{name} is {tensor.dtype}; supported on {config.device} are {', '.join(allowed)}: pass "
                "RolloutConfig(dtype=...)"
            )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Tell whether this is a DTensor, of which each rank holds a part."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _max_model_len(module: PreTrainedModel, config: RolloutConfig, unlimited_len: int | None) -> int:
    text_config = module.config.get_text_config()
    _checked_int("num_hidden_layers", text_config.num_hidden_layers, least=1)
    limit = _positions(text_config)
    if limit is None:
        length = config.max_model_len or unlimited_len
        if length is None:
            raise ModelLoadError("the model's config has no max_position_embeddings: give max_model_len")
        return length
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        exact = exact_positions(None, text_config.to_dict())
        of = ""
        if exact is not None and limit < text_config.max_position_embeddings:
            of = f" that are exact under its {exact.scaling} rotary scaling ({exact.key})"
        raise ModelLoadError(f"max_model_len={config.max_model_len} is more than the model's {limit} positions{of}")
    return config.max_model_len


def _positions(text_config: Any) -> int | None:
    """Return how many positions a model has, of which all are exact."""
    if not hasattr(text_config, "max_position_embeddings"):
        return None
    positions = _checked_int("max_position_embeddings", text_config.max_position_embeddings, least=2)
    exact = exact_positions(None, text_config.to_dict())
    return positions if exact is None else min(positions, exact.count)


def _checked_int(name: str, given: object, *, least: int) -> int:
    number = as_int(given)
    if number is None or number < least:
        raise ModelLoadError(f"the config's {name} must be an int of at least {least}, got {given!r}")
    return number


def _eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    """Read them from the generation config, which is where a chat model lists all of its end tokens."""
    generation = module.generation_config
    if generation is not None and generation.eos_token_id is not None:
        return _checked_ids(generation.eos_token_id)
    return _checked_ids(module.config.get_text_config().eos_token_id)


def _checked_ids(given: Any) -> tuple[int, ...]:
    ids = as_token_ids(given)
    if any(as_int(one) is None for one in ids):
        raise ModelLoadError(f"the model's eos_token_id must be an int or several, got {given!r}")
    return ids
