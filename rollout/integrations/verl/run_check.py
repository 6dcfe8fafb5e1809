"""A look at the whole configuration of a run, before Ray or any process is started.

Invariant: what the actor's processes or a server would refuse of their options when they start is refused here, in the
same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.utils.fs import is_non_local

from samebit.rollout.errors import ModelLoadError
from samebit.rollout.integrations.verl.exactness import check_exact
from samebit.rollout.integrations.verl.options import (
    ServerOptions,
    check_tokenizer,
    check_trainer,
    server_options,
    warn_about_the_rest,
)
from samebit.rollout.integrations.verl.plugin import NAME


def check_run(config: Any) -> None:
    """Raise for what does not go together, and name in one warning what samebit has no use for.

    Args:
        config: verl's, of a whole run. One with another `rollout.name` is not looked at.

    Raises:
        ValueError: as `server_options`, `check_trainer` and `check_exact`, or of the run as a whole, by name.
        ModelLoadError: there is no model, or no tokenizer.
    """
    if OmegaConf.select(config, "actor_rollout_ref.rollout.name") != NAME:
        return
    run = config.actor_rollout_ref
    rollout = omega_conf_to_dataclass(run.rollout)
    _check_folders(server_options(rollout, run.model, 0, ""))
    check_trainer(rollout.dtype, run.model, OmegaConf.select(run, "actor.fsdp_config.mixed_precision"))
    engine = omega_conf_to_dataclass(run.actor).engine
    check_exact(run.model, engine)
    _refuse(config, rollout.checkpoint_engine, engine)
    warn_about_the_rest(rollout, engine)


def _check_folders(options: ServerOptions) -> None:
    """Of model and tokenizer, where they are of this machine."""
    if not is_non_local(options.model) and not Path(options.model).is_dir():
        raise ModelLoadError(
            f"no such model folder: {options.model} (actor_rollout_ref.model.path); samebit reads a folder, and "
            "downloads none but of HDFS"
        )
    if not is_non_local(options.tokenizer):
        check_tokenizer(options.tokenizer)


def _refuse(config: Any, transport: Any, engine: Mapping[str, Any]) -> None:
    """transport: `rollout.checkpoint_engine`. engine: of the actor."""
    unknown = transport.engine_kwargs.get(NAME) or {}
    refused = {
        "actor.fsdp_config.offload_policy=True on a CPU (it is for parameters on an accelerator)": (
            engine.get("offload_policy") and get_device_name() == "cpu"
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


def _has_servers_apart(config: Any) -> bool:
    """In `separate_async`, and where a configuration has a `rollout` beside `actor_rollout_ref`, as the experimental
    trainers have."""
    if (OmegaConf.select(config, "rollout.nnodes") or 0) > 0:
        return True
    v1 = OmegaConf.select(config, "trainer.use_v1")
    return bool(v1 and OmegaConf.select(config, "trainer.v1.trainer_mode") == "separate_async")
