"""Look at the whole configuration of a run, before Ray or any process is started.

Invariant: what the actor's processes or a server would refuse of their options when they start is refused here, in the
same words.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.utils.fs import is_non_local

from samebit.rollout.integrations.verl.names import IMAGES, NAME
from samebit.rollout.integrations.verl.options import (
    DTYPES,
    ServerOptions,
    check_tokenizer,
    check_trainer,
    server_options,
    warn_about_the_rest,
)
from samebit.rollout.integrations.verl.trainer.exactness import check_exact
from samebit.rollout.models.hub import model_folder
from samebit.rollout.sampling_params import SamplingParams

_STRATEGIES = ("fsdp", "fsdp2")
"""Lists the engines of verl that samebit knows; of the first it says by name what is amiss (`exactness`)."""

_NEEDS_LOGITS = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""Lists the advantage estimators that ask the actor for `calculate_sum_pi_squared`."""


def check_run(config: Any) -> None:
    """Raise for what does not go together, and name in one warning what samebit has no use for.

    Args:
        config: verl's, of a whole run. One with another `rollout.name` is not looked at, but for its reward model.

    Raises:
        ValueError: as `check_options`.
        ModelLoadError: there is no model, or no tokenizer.
    """
    revision = _take_revision(config)
    if check_options(config) is None:
        return
    run = config.actor_rollout_ref
    _resolve_names(run, revision)
    options = server_options(omega_conf_to_dataclass(run.rollout), run.model, 0, "")
    if options.worker.images:
        OmegaConf.update(run.model, f"fused_kernel_options.{IMAGES}", True, force_add=True)
    if not is_non_local(options.tokenizer):
        check_tokenizer(options.tokenizer)


def check_options(config: Any) -> ServerOptions | None:
    """Do the part of `check_run` that looks at no file; return what the first server would be started with.

    Raises:
        ValueError: as `server_options`, `check_trainer` and `check_exact`, or of the run as a whole, by name.
    """
    _refuse_reward_model(config)
    if OmegaConf.select(config, "actor_rollout_ref.rollout.name") != NAME:
        return None
    run = config.actor_rollout_ref
    _refuse_strategy(run)
    _refuse_critic(config)
    rollout = omega_conf_to_dataclass(run.rollout)
    options = server_options(rollout, run.model, 0, "")
    check_trainer(rollout.dtype, run.model, OmegaConf.select(run, "actor.fsdp_config.mixed_precision"))
    engine = omega_conf_to_dataclass(run.actor).engine
    check_exact(run.model, engine)
    if _has_reference_policy(config):
        _check_reference(run)
    if options.adapter is not None:
        _check_base(config, rollout.dtype, engine.get("model_dtype"))
    _check_sampling(rollout)
    _refuse(config, rollout.checkpoint_engine, engine)
    _check_slots(config)
    warn_about_the_rest(rollout, engine, adapted=options.adapter is not None)
    return options


def _refuse_reward_model(config: Any) -> None:
    model = OmegaConf.select(config, "reward.reward_model")
    if model is not None and model.enable and OmegaConf.select(model, "rollout.name", throw_on_missing=False) == NAME:
        raise ValueError(
            "reward.reward_model.rollout.name=samebit: verl asks a reward model over HTTP, and samebit's servers speak "
            "none; serve it with another rollout, or use reward.custom_reward_function"
        )


def _refuse_strategy(run: Any) -> None:
    """Look before the options become those of one engine, which another knows nothing of."""
    for part in ("actor", "ref"):
        strategy = OmegaConf.select(run, f"{part}.strategy")
        if strategy is not None and strategy not in _STRATEGIES:
            raise ValueError(
                f"rollout.name=samebit does not go with {part}.strategy={strategy}: samebit's forward is in verl's "
                "FSDP2 engine alone; set model_engine=dp and actor_rollout_ref.actor.strategy=fsdp2"
            )


def _refuse_critic(config: Any) -> None:
    estimator = str(OmegaConf.select(config, "algorithm.adv_estimator"))
    if get_device_name() == "cpu":
        asked = "critic.enable=True" if OmegaConf.select(config, "critic.enable") else ""
        if estimator == "gae":
            asked = "algorithm.adv_estimator=gae, verl's default,"
        if asked:
            raise ValueError(
                f"{asked} trains a critic, and there is no engine of a critic for a CPU: set algorithm.adv_estimator="
                "grpo (or rloo, reinforce_plus_plus, another that needs no critic) and leave critic.enable at null"
            )
    if estimator in _NEEDS_LOGITS:
        raise ValueError(
            f"algorithm.adv_estimator={estimator} needs logits (actor.calculate_sum_pi_squared), and a fused forward "
            "gives none: set algorithm.adv_estimator=grpo or another"
        )


def _has_reference_policy(config: Any) -> bool:
    return bool(
        OmegaConf.select(config, "algorithm.use_kl_in_reward")
        or OmegaConf.select(config, "actor_rollout_ref.actor.use_kl_loss")
    )


def _check_reference(run: Any) -> None:
    """Check the reference policy: its engine is samebit's too, with options of its own."""
    engine = dict(run.ref.fsdp_config) | {"strategy": run.ref.strategy}
    sizes = (engine.get("ulysses_sequence_parallel_size"), run.ref.ulysses_sequence_parallel_size)
    engine["ulysses_sequence_parallel_size"] = max(size or 1 for size in sizes)
    try:
        check_exact(run.model, engine)
    except ValueError as error:
        raise ValueError(f"actor_rollout_ref.ref: {error}") from error
    if not run.model.lora_rank:  # else it is the actor without its adapter
        _check_reference_dtype(run)


def _check_reference_dtype(run: Any) -> None:
    option = "fsdp_config.mixed_precision.param_dtype"
    actor, reference = (str(OmegaConf.select(run, f"{part}.{option}") or "bf16") for part in ("actor", "ref"))
    if DTYPES.get(actor) != DTYPES.get(reference):
        raise ValueError(
            f"the actor computes in {actor} (actor.{option}), its reference policy in {reference} (ref.{option}, by "
            "verl's default bf16): their KL divergence would be one of roundings, and not 0 where they are the same "
            f"policy; set ++actor_rollout_ref.ref.{option}={actor}"
        )


def _check_base(config: Any, computed: str, loaded: str | None) -> None:
    """Check that the model under an adapter is the servers' where these read it from its folder: verl loads it in
    `model_dtype`, whatever the dtype that it computes in."""
    rounds = DTYPES.get(str(loaded)) == "bfloat16" and DTYPES.get(computed) != "bfloat16"
    load_format = str(OmegaConf.select(config, "actor_rollout_ref.rollout.load_format"))
    given = [] if "dummy" in load_format else [f"rollout.load_format={load_format}"]
    given += ["servers of their own"] if _has_servers_apart(config) else []
    if rounds and given:
        raise ValueError(
            f"model.lora_rank > 0 with {' and '.join(given)}: servers read the base model from model.path in "
            f"{computed}, and actor.fsdp_config.model_dtype={loaded} rounds the trainer's. Set "
            "actor.fsdp_config.model_dtype=fp32, or let the trainer send it (rollout.load_format=dummy, with servers "
            "that share its resources)"
        )


def _check_sampling(rollout: Any) -> None:
    """Check what every request of a run will ask for. Validation may be greedy, training may not."""
    for place, asked in (("rollout", rollout), ("rollout.val_kwargs", rollout.val_kwargs)):
        try:
            SamplingParams(n=asked.n, temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p)
        except ValueError as error:
            raise ValueError(f"{place}.{error}") from error
    try:
        SamplingParams(repetition_penalty=rollout.repetition_penalty)
    except ValueError as error:
        raise ValueError(f"rollout.{error}") from error
    if rollout.temperature == 0:
        raise ValueError(
            "rollout.temperature=0: the trainer divides logits by it; set a temperature above 0 (validation is greedy "
            "with rollout.val_kwargs.temperature=0)"
        )
    if rollout.max_model_len is not None and rollout.max_model_len <= rollout.prompt_length:
        raise ValueError(
            f"rollout.max_model_len={rollout.max_model_len} leaves no room for a token behind a prompt of "
            f"rollout.prompt_length={rollout.prompt_length}"
        )


def _check_slots(config: Any) -> None:
    """Check that Ray knows enough GPUs: on a CPU verl counts its workers in them, where it starts Ray itself."""
    start = OmegaConf.select(config, "ray_kwargs.ray_init") or {}
    elsewhere = ray.is_initialized() or start.get("address") or os.environ.get("RAY_ADDRESS")
    if config.trainer.device != "cpu" or get_device_name() != "cpu" or elsewhere:
        return
    needed = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if _has_servers_apart(config):
        apart = (OmegaConf.select(config, place) or {} for place in ("rollout", "actor_rollout_ref.rollout"))
        needed += max((one.get("nnodes") or 0) * (one.get("n_gpus_per_node") or 0) for one in apart)
    given = start.get("num_gpus") or 0
    if given < needed:
        raise ValueError(
            f"this run has {needed} workers, which verl counts in GPUs, and Ray is told of {given}: set "
            f"++ray_kwargs.ray_init.num_gpus={needed} (on a CPU they are slots, nothing more)"
        )


def _take_revision(config: Any) -> str | None:
    """Take `custom.revision` out of the options: it says which commit of a name is meant, and no server needs it."""
    custom = OmegaConf.select(config, "actor_rollout_ref.rollout.custom")
    if OmegaConf.select(config, "actor_rollout_ref.rollout.name") != NAME or not isinstance(custom, DictConfig):
        return None
    if "revision" not in custom:
        return None
    with open_dict(custom):
        revision: str | None = custom.pop("revision")
    return revision


def _resolve_names(run: Any, revision: str | None) -> None:
    """Put the folder of one commit in the place of a name of the hub, before trainer or servers read it."""
    if not (isinstance(run.model.path, str) and run.model.path):
        raise ValueError(f"actor_rollout_ref.model.path must be a folder or a name of the hub, got {run.model.path!r}")
    for option in ("path", "tokenizer_path"):
        given = run.model.get(option)
        if given and not is_non_local(given):
            known = Path(given).is_dir()  # and what `revision` says is of the other
            folder = model_folder(given, revision if option == "path" or not known else None)
            if not known:
                OmegaConf.update(run.model, option, str(folder))


def _refuse(config: Any, transport: Any, engine: Mapping[str, Any]) -> None:
    """Refuse by name what samebit can not do. transport: `rollout.checkpoint_engine`. engine: of the actor."""
    unknown = transport.engine_kwargs.get(NAME) or {}
    refused = {
        "fsdp_config.offload_policy=True on a CPU (it is for parameters on an accelerator)": (
            get_device_name() == "cpu" and (engine.get("offload_policy") or _offloads_reference(config))
        ),
        "actor.fsdp_config.offload_policy=True on a GPU (weights are gathered there; use param_offload=True)": (
            get_device_name() == "cuda" and engine.get("offload_policy")
        ),
        "model.enable_activation_offload=True on a CPU (it copies activations from an accelerator)": (
            config.actor_rollout_ref.model.get("enable_activation_offload") and get_device_name() == "cpu"
        ),
        "actor.calculate_sum_pi_squared=True (it needs logits, and a fused forward gives none)": (
            OmegaConf.select(config, "actor_rollout_ref.actor.calculate_sum_pi_squared")
        ),
        "distillation.enabled=True (it was not run; forward_kl_topk needs logits, and a fused forward gives none)": (
            OmegaConf.select(config, "distillation.enabled")
        ),
        f"rollout.checkpoint_engine.backend={transport.backend} with servers of their own (use samebit)": (
            _has_servers_apart(config) and transport.backend != NAME
        ),
        f"rollout.checkpoint_engine.engine_kwargs.samebit.{', '.join(map(str, unknown))} (it knows none; there are "
        "rollout.checkpoint_engine.update_weights_bucket_megabytes and rollout.custom.sync_timeout)": bool(unknown),
    }
    found = [option for option, present in refused.items() if present]
    if found:
        raise ValueError(f"rollout.name=samebit does not go with {'; '.join(found)}")


def _offloads_reference(config: Any) -> bool:
    offloads = OmegaConf.select(config, "actor_rollout_ref.ref.fsdp_config.offload_policy")
    return bool(_has_reference_policy(config) and offloads)


def _has_servers_apart(config: Any) -> bool:
    """Tell whether servers are apart: in `separate_async`, and with a `rollout` beside `actor_rollout_ref`, as the
    experimental trainers have."""
    if (OmegaConf.select(config, "rollout.nnodes") or 0) > 0:
        return True
    v1 = OmegaConf.select(config, "trainer.use_v1")
    return bool(v1 and OmegaConf.select(config, "trainer.v1.trainer_mode") == "separate_async")
