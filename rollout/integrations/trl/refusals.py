"""Say under which of TRL's options the trainer's bits would not be the rollout's, before anything is trained.

Invariant: an option under which something else than samebit generates or computes, or that would go unheard, is refused
by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import ProcessorMixin
from transformers.training_args import OptimizerNames

from samebit.kernels.binding.binding import Binding
from samebit.rollout.integrations.trl.sampling import REGEX
from samebit.weight_sync.manifest import float32_names

_OPTIMIZERS = ("lomo", "adalomo", "schedule_free", "layerwise")
"""Lists parts of the names of optimizers that write weights at other times than in their step."""


_REFUSED = {
    "use_vllm": "samebit generates",
    "use_transformers_continuous_batching": "samebit generates",
    "use_transformers_paged": "samebit generates",
    "cache_implementation": "samebit keeps keys and values itself",
    "use_liger_kernel": "the model's layers are samebit's",
    "cast_lm_head_to_fp32": "the head computes in the model's dtype, with float32 sums and log-probabilities",
    "fp16": "autocast does not reach a bound model: load it in the dtype that it shall compute in",
    "fp16_full_eval": "it casts the model in place, under the worker",
    "torch_compile": "a compiled model can not be bound exactly",
    "fsdp": "one process",
    "deepspeed": "one process",
    "neftune_noise_alpha": "the trainer's embeddings would not be the rollout's",
}
"""Lists options that are refused where they are set, and why."""

_COLUMNS = ("image", "images")
"""Names the columns in which TRL looks for images."""

_BF16 = ("bf16=True, TRL's default", "pass bf16=False")
_BF16_OF_LAUNCHER = (
    "ACCELERATE_MIXED_PRECISION=bf16, which `accelerate launch` sets by its option or config file",
    "set it to no",
)
"""Tell where mixed precision comes from, and how it is switched off."""


def check_arguments(args: Any) -> None:
    """Raise for the options of TRL's config that do not go with samebit.

    Args:
        args: `GRPOConfig`, `RLOOConfig` or `AsyncGRPOConfig`; an option that one of them lacks is not looked at.

    Raises:
        ValueError: all of them, by name.
    """
    given = vars(args)
    found = [f"{name}={given[name]!r} ({why})" for name, why in _REFUSED.items() if given.get(name)]
    found += [f"{name}={given[name]!r} (samebit generates)" for name in _of_vllm(args)]
    model = given.get("model_init_kwargs")
    kernels = isinstance(model, Mapping) and model.get("use_kernels")
    found += ["model_init_kwargs['use_kernels']=True (the model's layers are samebit's)"] if kernels else []
    optimizer = OptimizerNames(given["optim"]).value
    if any(name in optimizer for name in _OPTIMIZERS):
        found.append(f"optim={optimizer!r} (it changes weights outside of its step, which no rollout is told of)")
    if given["temperature"] <= 0:
        found.append(f"temperature={given['temperature']} (the trainer's log-probabilities need one above 0)")
    _raise_if(found)


def _of_vllm(args: Any) -> list[str]:
    """Return the options of a vLLM that somebody has set. Its importance sampling corrects nothing here, whatever its
    options say."""
    own = [one for one in dataclasses.fields(args) if one.name.startswith("vllm_")]
    own = [one for one in own if not one.name.startswith("vllm_importance_sampling_") and one.name != REGEX]
    return [one.name for one in own if vars(args)[one.name] != one.default]


def check_served_nowhere(args: Any) -> None:
    """Raise for options of AsyncGRPO that are for a server, or for sending weights to one less often.

    Raises:
        ValueError: all of them, by name.
    """
    usual = {one.name: one.default for one in dataclasses.fields(args)}
    names = ("vllm_server_base_url", "vllm_server_timeout", "request_timeout", "weight_sync_timeout")
    given = vars(args)
    found = [f"{name}={given[name]!r} (there is no server)" for name in names if given[name] != usual[name]]
    if args.weight_sync_steps != 1:
        found.append(f"weight_sync_steps={args.weight_sync_steps} (worker and trainer share one module: 1)")
    _raise_if(found)


def check_text_alone(dataset: Any, options: Iterable[object]) -> None:
    """Raise for images of which AsyncGRPO would not hear.

    Args:
        dataset: a `Dataset` or `IterableDataset`, or None; one that does not know its columns is not looked at.
        options: other arguments of the trainer, a processor maybe among them.

    Raises:
        ValueError: columns of images, a processor, by name.
    """
    columns = () if dataset is None else dataset.column_names or ()
    found = [
        f"the column {name!r} of train_dataset (AsyncGRPO is of text alone)" for name in _COLUMNS if name in columns
    ]
    found += [_of_processor(one, "AsyncGRPO is of text alone") for one in options if isinstance(one, ProcessorMixin)]
    _raise_if(found)


def check_model(trainer: Any, model: nn.Module) -> None:
    """Raise for a model, device or number of processes that samebit can not serve to a trainer.

    Args:
        trainer: TRL's, built.
        model: the one that it trains.

    Raises:
        ValueError: all reasons, by name.
    """
    kept = float32_names(model)
    dtypes = {
        parameter.dtype
        for name, parameter in model.named_parameters()
        if "lora_" not in name and (name not in kept or parameter.dtype is not torch.float32)
    }
    found = []
    # Accelerate's, not `args.bf16`: its launcher says so by the environment. (It refuses fp16 itself on a CPU.)
    if trainer.accelerator.mixed_precision == "bf16" and dtypes != {torch.bfloat16}:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        given, otherwise = _BF16 if trainer.args.bf16 else _BF16_OF_LAUNCHER
        found.append(
            f"{given}, with parameters of {names} (autocast does not reach a bound model: {otherwise}, or load the "
            "model in bfloat16 with model_init_kwargs={'dtype': 'bfloat16'})"
        )
    if trainer.args.bf16_full_eval and dtypes != {torch.bfloat16}:
        found.append(
            "bf16_full_eval=True with a model that is not bfloat16 (it casts the model in place, under the worker)"
        )
    if trainer.accelerator.num_processes > 1:
        found.append(f"{trainer.accelerator.num_processes} processes (one)")
    if trainer.accelerator.device.type != "cpu":
        found.append(f"the device {trainer.accelerator.device} (TRL was run on the CPU alone: use_cpu=True)")
    if trainer.aux_loss_enabled:
        found.append("the loss that balances a router's experts (pass router_aux_loss_coef=0.0)")
    _raise_if(found)


def check_processor(processing_class: Any, binding: Binding) -> None:
    """Raise for a processor of images where none are computed, or where TRL would misplace their tokens.

    Args:
        processing_class: the trainer's.
        binding: of its model.

    Raises:
        ValueError: why, by name.
    """
    if not isinstance(processing_class, ProcessorMixin):
        return
    if binding.images is None:
        _raise_if([_of_processor(processing_class, f"this model computes text alone{binding.why_no_images}")])
    side = processing_class.tokenizer.padding_side
    if side != "left":
        _raise_if([f"padding_side={side!r} of the processor's tokenizer (left, where TRL pads prompts)"])


def _of_processor(processor: ProcessorMixin, why: str) -> str:
    name = type(processor).__name__
    return f"processing_class={name} ({why}: pass the tokenizer, AutoTokenizer.from_pretrained(...))"


def _raise_if(found: list[str]) -> None:
    if found:
        raise ValueError(f"samebit under TRL does not go with {'; '.join(found)}")
