"""Read verl's rollout options as samebit understands them.

Invariant: an option is honoured, refused by name, or named once in a warning; none is dropped silently.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from verl.utils.device import get_device_name

from samebit.rollout.checks import as_int, check_bool, check_positive_int
from samebit.rollout.config import RolloutConfig
from samebit.rollout.errors import ModelLoadError
from samebit.rollout.models.tokenizers import TOKENIZER_FILES, has_tokenizer
from samebit.weight_sync.wire.link import DEFAULT_TIMEOUT
from samebit.weight_sync.wire.patience import check_timeout

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}

WORKER_OPTIONS = (
    "block_size", "num_blocks", "kv_cache_gb", "eviction_policy", "state_cache_gb", "num_threads",
    "num_speculative_tokens", "prompt_lookup_min", "speculative_step_tokens", "speculative_history_tokens",
    "draft_model", "draft_revision", "draft_cache_gb", "images",
)  # fmt: skip
"""Lists the keys of `rollout.custom` that are fields of `RolloutConfig`, for which verl has no option."""

SERVER_OPTIONS = ("num_cpus", "sync_timeout", "routed_experts")
"""Lists the keys of `rollout.custom` for a server: its cores in Ray; the longest wait in a weight update, in seconds;
whether servers report which experts computed each token."""

_SIZES = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size")
"""Lists the options of a server that is several processes."""

_OF_ADAPTER = {
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
}
"""Lists the fields of an adapter's config that verl's options of the model set."""

_NOT_HONOURED: dict[str, Any] = {
    "gpu_memory_utilization": 0.5,
    "standalone_gpu_memory_utilization": None,
    "enforce_eager": False,
    "cudagraph_capture_sizes": None,
    "enable_chunked_prefill": True,
    "logprobs_mode": "processed_logprobs",
    "scheduling_policy": "fcfs",
    "multi_stage_wake_up": False,
    "layered_summon": False,
    "load_format": "dummy",
    "limit_images": None,
    "skip_tokenizer_init": True,
    "full_determinism": False,
    "do_sample": True,
    "disable_log_stats": True,
    "over_sample_rate": 0.0,
    "enable_sleep_mode": True,
    "quantization_config_file": None,
    "layer_name_map": {},
    "sglang_engine_mode": "local",
    "prometheus.enable": False,
    "server.timeout": 60.0,
    "server.max_attempts": 3,
    "server.retry_delay": 2.0,
    "server.max_connections": 1000,
    "server.max_start_wait_time": 300.0,
}
"""Lists options for which samebit has no use, with verl's defaults; another value is named in a warning."""

_POOL_SIZES = {"num_blocks", "kv_cache_gb"}
_OF_A_GPU = ("gpu_memory_utilization", "enforce_eager")
"""Lists those of them that a GPU has a use for."""

_OF_A_BROADCAST = {"checkpoint_engine.update_weights_bucket_megabytes": 2048}
"""Lists the same, where weights go through shared memory."""

_OF_ENTROPY = ("entropy_checkpointing", "entropy_from_logits_with_chunking")
"""Lists the training engine's keys for verl's own entropy, which is not asked for."""


@dataclass(frozen=True)
class AdapterOption:
    """Says of the adapter that is trained which layers it changes: the fields of its config, or the folder, here or
    elsewhere, whose config the trainer reads too."""

    fields: Mapping[str, Any]
    folder: str | None

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> AdapterOption | None:
        """Return what verl's options of the model say; None for a trainer of all weights."""
        if not model.get("lora_rank"):
            return None
        fields = {name: _plain(model[option]) for name, option in _OF_ADAPTER.items()}
        return cls(fields, model.get("lora_adapter_path"))


@dataclass(frozen=True)
class ServerOptions:
    """Holds what one server is started with.

    worker: but for what only its own process can know of the device (`worker_config`).
    frees_memory: `sleep` and `release_kv_cache` release memory (verl's `free_cache_engine`).
    gpu_share: verl's `gpu_memory_utilization`, None where the pool is sized by `rollout.custom`.
    traces: where profiles go, None for a server that is not profiled. adapter: the one that is trained, if it is one.
    """

    name: str
    model: str
    tokenizer: str
    worker: RolloutConfig
    prompt_length: int
    response_length: int
    repetition_penalty: float
    ignore_eos: bool
    frees_memory: bool
    num_cpus: int
    sync_timeout: float
    routed_experts: bool
    traces: Path | None
    adapter: AdapterOption | None = None
    device: str = "cpu"
    gpu_share: float | None = None
    enforce_eager: bool = False

    def worker_config(self) -> RolloutConfig:
        """Return the worker's options in its own process, where a GPU can be seen that others have not.

        Raises:
            ValueError: what `RolloutConfig` refuses on the device.
        """
        if self.device == "cpu":
            return self.worker
        return replace(
            self.worker, device=self.device, gpu_memory_utilization=self.gpu_share, enforce_eager=self.enforce_eager
        )


def server_options(rollout: Any, model: Mapping[str, Any], replica_rank: int, name: str) -> ServerOptions:
    """Translate verl's `RolloutConfig` and its options of the model. `name`: of the server.

    Raises:
        ValueError: options that samebit refuses, and unknown ones in `rollout.custom`, by name.
    """
    _check_kinds(rollout)
    _refuse(rollout)
    custom = _custom(rollout.custom)
    if custom.get("images"):
        _check_images(model)
    worker = RolloutConfig(
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=max(rollout.max_num_batched_tokens, rollout.max_num_seqs),
        max_model_len=rollout.max_model_len,
        enable_prefix_caching=rollout.enable_prefix_caching,
        dtype=_dtype(rollout.dtype),
        seed=rollout.seed + replica_rank,
        **{name: custom[name] for name in WORKER_OPTIONS if name in custom},
    )
    num_cpus = custom.get("num_cpus", 1)
    check_positive_int("rollout.custom.num_cpus", num_cpus)
    routed_experts = custom.get("routed_experts", False)
    check_bool("rollout.custom.routed_experts", routed_experts)
    return ServerOptions(
        name=name,
        model=model["path"],
        tokenizer=model.get("tokenizer_path") or model["path"],
        worker=worker,
        prompt_length=rollout.prompt_length,
        response_length=rollout.response_length,
        repetition_penalty=rollout.repetition_penalty,
        ignore_eos=rollout.ignore_eos,
        frees_memory=rollout.free_cache_engine,
        num_cpus=num_cpus,
        sync_timeout=sync_timeout(custom),
        routed_experts=routed_experts,
        traces=_traces(rollout.profiler, replica_rank),
        adapter=AdapterOption.of(model),
        device=get_device_name(),
        gpu_share=None if custom.keys() & _POOL_SIZES else rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
    )


def sync_timeout(custom: Mapping[str, Any] | None) -> float:
    """Return the `sync_timeout` of `rollout.custom`. Raises ValueError for what is no time."""
    try:
        return check_timeout((custom or {}).get("sync_timeout", DEFAULT_TIMEOUT))
    except ValueError as error:
        raise ValueError(f"rollout.custom.sync_timeout: {error}") from error


def check_tokenizer(folder: str) -> None:
    """Raise `ModelLoadError` for a folder without one."""
    if not has_tokenizer(Path(folder)):
        raise ModelLoadError(f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}), and verl needs one")


def check_trainer(rollout_dtype: str, model: Mapping[str, Any], mixed_precision: Mapping[str, Any] | None) -> None:
    """Raise unless the trainer's log-probabilities are samebit's, in the dtype of the rollout.

    Args:
        rollout_dtype: verl's `rollout.dtype`.
        model: verl's options of the model.
        mixed_precision: of the actor's `fsdp_config`; None for verl's default, bfloat16.

    Raises:
        ValueError: what would have to be set.
    """
    backend = (model.get("fused_kernel_options") or {}).get("impl_backend")
    if backend != "samebit" or not model.get("use_fused_kernels"):
        raise ValueError(
            "rollout.name=samebit needs the trainer to compute log-probabilities as the rollout does: set "
            "actor_rollout_ref.model.use_fused_kernels=True and "
            f"actor_rollout_ref.model.fused_kernel_options.impl_backend=samebit (it is {backend!r})"
        )
    trained = (mixed_precision or {}).get("param_dtype", "bf16")
    if DTYPES.get(str(trained)) != _dtype(rollout_dtype):
        raise ValueError(
            f"the trainer computes in {trained} (actor.fsdp_config.mixed_precision.param_dtype), the rollout in "
            f"{rollout_dtype} (rollout.dtype): both must be bfloat16 or both float32"
        )


def _check_kinds(rollout: Any) -> None:
    """Check what verl hands on as it was written: its own checks are of few options."""
    for name in (*_SIZES, "max_num_seqs", "max_num_batched_tokens", "prompt_length", "response_length"):
        check_positive_int(f"rollout.{name}", vars(rollout)[name])
    for name in ("ignore_eos", "free_cache_engine", "enforce_eager", "enable_prefix_caching"):
        check_bool(f"rollout.{name}", vars(rollout)[name])
    if as_int(rollout.seed) is None:
        raise ValueError(f"rollout.seed must be an int, got {rollout.seed!r}")


def _refuse(rollout: Any) -> None:
    refused = [
        f"{name}={vars(rollout)[name]} (a server is one process: 1; for more servers, more GPUs)"
        for name in _SIZES
        if vars(rollout)[name] > 1
    ]
    if rollout.quantization:
        refused.append(f"quantization={rollout.quantization} (weights are served as they are trained: null)")
    refused += ["qat.enable=True"] if rollout.qat and rollout.qat.get("enable") else []
    refused += ["mtp.enable_rollout=True"] if rollout.mtp and rollout.mtp.enable_rollout else []
    if rollout.enable_rollout_routing_replay:
        refused.append(
            "enable_rollout_routing_replay=True (there is nothing to replay: the trainer's routers see the bits that "
            "the rollout's saw, and choose the same experts; custom.routed_experts=True counts the pairs that differ)"
        )
    if refused:
        raise ValueError(
            f"rollout.name=samebit does not go with {'; '.join(f'rollout.{option}' for option in refused)}"
        )


def _custom(custom: Mapping[str, Any] | None) -> dict[str, Any]:
    if custom is not None and not isinstance(custom, Mapping):
        raise ValueError(f"rollout.custom must be a mapping of options, got {custom!r}")
    given = dict(custom or {})
    allowed = (*WORKER_OPTIONS, *SERVER_OPTIONS)
    unknown = [name for name in given if name not in allowed]
    if unknown:
        raise ValueError(
            f"unknown in rollout.custom: {', '.join(map(str, unknown))}; samebit knows {', '.join(allowed)}"
        )
    return given


def _check_images(model: Mapping[str, Any]) -> None:
    """Raise ValueError for what does not go with prompts that have images."""
    refused = {
        f"model.lora_rank={model.get('lora_rank')} (its base travels without vision: train all weights, lora_rank=0)": (
            model.get("lora_rank")
        ),
        f"a device that is no CPU ({get_device_name()}: no GPU has run the kernels of vision)": (
            get_device_name() != "cpu"
        ),
    }
    found = [option for option, present in refused.items() if present]
    if found:
        raise ValueError(f"rollout.custom.images=True does not go with {'; '.join(found)}")


def _traces(profiler: Any, replica_rank: int) -> Path | None:
    """Return where the traces of this server go, if `rollout.profiler` wants any."""
    if profiler is None or not profiler.enable or not (profiler.all_ranks or profiler.ranks):
        return None
    if profiler.tool != "torch":
        raise ValueError(f"samebit's servers are profiled with rollout.profiler.tool=torch, not {profiler.tool!r}")
    return Path(profiler.save_path) if profiler.all_ranks or replica_rank in profiler.ranks else None


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"rollout.dtype must be one of {', '.join(DTYPES)} with rollout.name=samebit, got {name!r}")
    return DTYPES[name]


def warn_about_the_rest(rollout: Any, engine: Mapping[str, Any], *, adapted: bool = False) -> None:
    """Name what is given and has no meaning here. engine: verl's options of the actor's engine. adapted: an adapter is
    trained, whose base model verl then sends or not by `load_format`."""
    usual = _NOT_HONOURED | (_OF_A_BROADCAST if rollout.checkpoint_engine.backend == "naive" else {})
    if adapted:
        usual = {name: default for name, default in usual.items() if name != "load_format"}
    if get_device_name() == "cuda":
        replaced = (rollout.custom or {}).keys() & _POOL_SIZES
        honoured = _OF_A_GPU[1:] if replaced else _OF_A_GPU
        usual = {name: default for name, default in usual.items() if name not in honoured}
    found = {name: _value(rollout, name, default) for name, default in usual.items()}
    given = [f"rollout.{name}={value}" for name, value in found.items() if value != usual[name]]
    given += [f"rollout.engine_kwargs.{name}" for name, kwargs in rollout.engine_kwargs.items() if kwargs]
    given += [f"actor.fsdp_config.{name}=True" for name in _OF_ENTROPY if engine.get(name)]
    if given:
        logger.warning("rollout.name=samebit has no use for: %s", ", ".join(given))
    if rollout.repetition_penalty != 1.0:
        logger.warning(
            "rollout.repetition_penalty=%s has an effect only in an agent loop of yours that asks for none itself: "
            "verl's own ask for 1.0 in each request",
            rollout.repetition_penalty,
        )
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        logger.warning(
            "rollout.max_num_batched_tokens=%d is raised to rollout.max_num_seqs=%d: a step has a token of each",
            rollout.max_num_batched_tokens,
            rollout.max_num_seqs,
        )


def _value(rollout: Any, name: str, default: Any) -> Any:
    """Return the value of an option, or of one inside another, which is a dict where verl's yaml files lack it."""
    outer, _, inner = name.partition(".")
    value = vars(rollout)[outer]
    return value.get(inner, default) if inner else value
