"""Say under which of verl's options the trainer's bits would not be the servers'.

Invariant: a server builds its model from the folder `model.path` alone, with transformers' own classes; an option that
makes the trainer's model another one, or computes it in another way, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.utils.device import get_device_name

from samebit.kernels.binding.families.inexact import DROPOUTS

DEVICES = ("cpu", "cuda")
"""Lists the devices that samebit computes on, by verl's names."""

_ATTENTION = "attn_implementation"
"""Names the entry of `model.override_config` that says nothing here: a bound model has an attention of its own."""


def check_exact(model: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    """Raise for every option under which the bits would not be samebit's.

    Args:
        model: verl's options of the model, before or after it made its `HFModelConfig` of them.
        engine: verl's options of the training engine.

    Raises:
        ValueError: all of them, by name.
    """
    precision = (engine.get("mixed_precision") or {}).get("param_dtype")
    refused = {
        "model.use_fused_kernels=False": not model["use_fused_kernels"],
        "model.use_liger=True": model["use_liger"],
        **_lora_refusals(model),
        "model.tiled_mlp.enabled=True": (model["tiled_mlp"] or {}).get("enabled"),
        "model.trust_remote_code=True (servers run no code of the folder's)": model["trust_remote_code"],
        **{f"{name} (servers read the folder's config.json: set it there)": True for name in _of_another_config(model)},
        f"strategy={engine.get('strategy')} (use fsdp2)": engine.get("strategy") != "fsdp2",
        "ulysses_sequence_parallel_size > 1": engine.get("ulysses_sequence_parallel_size", 1) > 1,
        "qat.enable=True": (engine.get("qat") or {}).get("enable"),
        "mixed_precision.param_dtype=fp16": precision in ("fp16", "float16", "half"),
        f"a device that is neither a CPU nor an NVIDIA GPU ({get_device_name()})": get_device_name() not in DEVICES,
    }
    found = [option for option, present in refused.items() if present]
    if found:
        raise ValueError(f"fused_kernel_options.impl_backend=samebit can not be exact with {'; '.join(found)}")


def _lora_refusals(model: Mapping[str, Any]) -> dict[str, object]:
    """Return what of verl's options of an adapter is not exact, or would have no effect."""
    of_megatron = model.get("lora") or {}
    adapted = model["lora_rank"] > 0
    return {
        "model.lora.rank > 0 (it is Megatron's: use model.lora_rank)": (of_megatron.get("rank") or 0) > 0,
        "model.lora.merge=True (merged weights are another policy than the one that is trained)": (
            of_megatron.get("merge")
        ),
        f"model.lora_rank={model['lora_rank']} (use 0 for no adapter)": model["lora_rank"] < 0,
        "model.lora_adapter_path without model.lora_rank (verl reads it only with a rank above 0)": (
            model.get("lora_adapter_path") and not adapted
        ),
        "model.target_parameters (exact are adapters on linear layers)": model.get("target_parameters") and adapted,
    }


def check_class(module: object) -> None:
    """Raise unless the trainer's model is of transformers, as a server's is: `model.external_lib` may register more.

    Raises:
        ValueError: where the class comes from.
    """
    found = type(module)
    if not found.__module__.startswith("transformers."):
        raise ValueError(
            f"the trainer's {found.__name__} is of {found.__module__}, the servers' of transformers: with "
            "fused_kernel_options.impl_backend=samebit nothing, model.external_lib neither, may register another class"
        )


def _telling(given: Mapping[str, Any]) -> list[str]:
    """Return the keys by which a model would compute something else: not its attention, which is samebit's, and not
    that it has no dropout, as the servers' has none."""
    idle = [name for name in DROPOUTS if name in given and not given[name]]
    return [name for name in given if name not in (_ATTENTION, *idle)]


def _of_another_config(model: Mapping[str, Any]) -> list[str]:
    """Return the options by which the trainer's config would differ from the one in the folder."""
    given = model["override_config"] or {}
    nested = given.get("model_config") or {}
    names = [f"model.override_config.{name}" for name in _telling(given) if name != "model_config"]
    names += [f"model.override_config.model_config.{name}" for name in _telling(nested)]
    if model["hf_config_path"] not in (None, model["path"]):
        names.append(f"model.hf_config_path={model['hf_config_path']}")
    return names
