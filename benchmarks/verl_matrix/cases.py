"""List the runs of the matrix: what each tells verl beside recipes/verl_grpo/tiny.yaml."""

from dataclasses import dataclass
from itertools import product

from samebit.recipes.verl_grpo.launch import V1

Options = dict[str, object]

PROMPTS, SAMPLES = 4, 4
"""Sets the size of a step: little, so that it is short."""

SAVED = 10
"""One run writes the checkpoint of this step, and another goes on from it."""

_TRAINER = "trainer.v1"
_WARMUP = f"{_TRAINER}.colocate_async.num_warmup_batches"
_AHEAD = f"{_TRAINER}.separate_async.num_warmup_batches"
_OFF_POLICY: Options = {f"{_TRAINER}.sampler.custom_sampler.name": "OffPolicy"}
_SERVERS_APART: Options = {
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "samebit",
    "ray_kwargs.ray_init.num_gpus": 2,
}
_EXPERIMENTAL: Options = {
    **_SERVERS_APART,
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 1,
    "trainer.use_v1": False,
    "ray_kwargs.ray_init.num_cpus": 40,
}
MODES: dict[str, Options] = {
    "sync": {},
    "colocate_async": {f"{_TRAINER}.trainer_mode": "colocate_async", _WARMUP: 0, **_OFF_POLICY},
    "separate_async": {
        f"{_TRAINER}.trainer_mode": "separate_async",
        f"{_TRAINER}.separate_async.parameter_sync_step": 1,
        **_OFF_POLICY,
        **_SERVERS_APART,
    },
    "one_step_off": {**_EXPERIMENTAL, "actor_rollout_ref.rollout.free_cache_engine": False},
    "fully_async": {
        **_EXPERIMENTAL,
        "data.train_batch_size": 0,
        "data.gen_batch_size": 1,
        "async_training.staleness_threshold": 0,
        "async_training.trigger_parameter_sync_step": 1,
        "async_training.require_batches": 1,
        "async_training.partial_rollout": True,
        "async_training.use_trainer_do_validate": False,
    },
}
PACKINGS: dict[str, Options] = {
    "padded": {"actor_rollout_ref.model.use_remove_padding": False},
    "packed": {},
    "dynamic": {
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 500,
    },
    "micro4": {"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4},
}
DTYPES: dict[str, Options] = {
    "fp32": {},
    "bf16": {
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "bf16",
        "actor_rollout_ref.rollout.dtype": "bfloat16",
    },
}
_ENTRIES = {
    "one_step_off": "verl.experimental.one_step_off_policy.main_ppo",
    "fully_async": "verl.experimental.fully_async_policy.fully_async_main",
}
_COLD: Options = {"actor_rollout_ref.rollout.temperature": 0.7}
_ROUTES: Options = {"actor_rollout_ref.rollout.custom.routed_experts": True}
_LORA: Options = {
    "actor_rollout_ref.model.lora_rank": 8,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
}
_TWO_RANKS: Options = {"trainer.n_gpus_per_node": 2}


@dataclass(frozen=True)
class Case:
    """Describes one run.

    entry: verl's module for the kind of trainer. architecture: the model's. resumes: the run from whose checkpoint of
    step `SAVED` this one continues. num_threads: of each process of the trainer; a server's are an option.
    """

    options: Options
    entry: str = V1
    architecture: str = "dense"
    resumes: str | None = None
    num_threads: int = 1

    def settings(self, steps: int) -> Options:
        """Return the case's options for a run of this many steps."""
        if self.entry != _ENTRIES["fully_async"]:
            return self.options
        return {**self.options, "rollout.total_rollout_steps": (steps + 1) * PROMPTS}

    def logged(self, steps: int) -> int:
        """Return how many of the steps log their metrics at least.

        fully_async may miss the last; a resumed run logs only its own.
        """
        if self.resumes is not None:
            return steps - SAVED
        return steps - 1 if self.entry == _ENTRIES["fully_async"] else steps


def settings(steps: int) -> Options:
    """Return the options that all runs have in common."""
    return {
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "data.train_batch_size": PROMPTS,
        "data.max_response_length": 48,
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
    }


def cases() -> dict[str, Case]:
    """Return all runs, by their names."""
    grid = {
        f"{mode}-{packing}-{dtype}": _case(mode, packing, dtype)
        for mode, packing, dtype in product(("sync", "colocate_async"), PACKINGS, DTYPES)
    }
    return grid | _servers_apart() | _variations() | _adapters()


def _servers_apart() -> dict[str, Case]:
    """Return runs of servers with their own resources, which get weights by broadcast."""
    return {
        "separate_async-packed-fp32": _case("separate_async", "packed", "fp32"),
        "separate_async-packed-bf16": _case("separate_async", "packed", "bf16"),
        "separate_async-packed-fp32-nothing-ahead": _case("separate_async", "packed", "fp32", **{_AHEAD: 0}),
        "separate_async-dynamic-bf16-nothing-ahead": _case("separate_async", "dynamic", "bf16", **{_AHEAD: 0}),
        "separate_async-packed-fp32-half-a-batch-ahead": _case(
            "separate_async", "packed", "fp32", **{_AHEAD: 0.5, "data.gen_batch_size": 1}
        ),
        "separate_async-packed-fp32-two-updates-a-sync": _case(
            "separate_async",
            "packed",
            "fp32",
            **{
                _AHEAD: 0,
                f"{_TRAINER}.separate_async.parameter_sync_step": 2,
                "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS // 2,
            },
        ),
        "one_step_off-packed-fp32": _case("one_step_off", "packed", "fp32"),
        "one_step_off-dynamic-bf16-learning-rate-0": _case(
            "one_step_off", "dynamic", "bf16", **{"actor_rollout_ref.actor.optim.lr": 0.0}
        ),
        "fully_async-packed-fp32": _case("fully_async", "packed", "fp32"),
        "fully_async-dynamic-bf16": _case("fully_async", "dynamic", "bf16"),
        "fully_async-packed-fp32-half-a-batch-ahead": _case(
            "fully_async", "packed", "fp32", **{"async_training.staleness_threshold": 0.5}
        ),
    }


def _variations() -> dict[str, Case]:
    """Return runs that vary one or two settings."""
    saving = "sync-packed-fp32-save"
    return {
        "colocate_async-packed-fp32-one-batch-ahead": _case("colocate_async", "packed", "fp32", **{_WARMUP: 1}),
        "sync-packed-fp32-temperature0.7": _case("sync", "packed", "fp32", **_COLD),
        "sync-padded-bf16-temperature0.7": _case("sync", "padded", "bf16", **_COLD),
        "sync-packed-fp32-two-ranks-kl": _case(
            "sync",
            "packed",
            "fp32",
            **_TWO_RANKS,
            **{"ray_kwargs.ray_init.num_gpus": 2, "actor_rollout_ref.actor.use_kl_loss": True},
        ),
        "sync-packed-fp32-two-ranks-fsdp-size-1": _case(
            "sync",
            "packed",
            "fp32",
            **_TWO_RANKS,
            **{"ray_kwargs.ray_init.num_gpus": 2, "actor_rollout_ref.actor.fsdp_config.fsdp_size": 1},
        ),
        "sync-packed-fp32-pad-to-length": _case(
            "sync", "packed", "fp32", **{"actor_rollout_ref.actor.fsdp_config.pad_to_length": True}
        ),
        "separate_async-packed-bf16-two-ranks": _case(
            "separate_async", "packed", "bf16", **_TWO_RANKS, **{_AHEAD: 0, "ray_kwargs.ray_init.num_gpus": 3}
        ),
        "sync-packed-fp32-no-checkpointing": _case(
            "sync", "packed", "fp32", **{"actor_rollout_ref.model.enable_gradient_checkpointing": False}
        ),
        "sync-packed-fp32-two-threads": Case({"actor_rollout_ref.rollout.custom.num_threads": 2}, num_threads=2),
        saving: _case("sync", "packed", "fp32", **{"trainer.save_freq": SAVED}),
        "sync-packed-fp32-resumed": Case({}, resumes=saving),
        "sync-packed-fp32-hybrid": Case({}, architecture="hybrid"),
        "sync-packed-fp32-gdn": Case({}, architecture="gdn"),
        "sync-packed-fp32-moe": Case(_ROUTES, architecture="moe"),
        "colocate_async-padded-bf16-moe": Case(
            {**MODES["colocate_async"], **PACKINGS["padded"], **DTYPES["bf16"], **_ROUTES}, architecture="moe"
        ),
        "colocate_async-padded-bf16-hybrid": Case(
            {**MODES["colocate_async"], **PACKINGS["padded"], **DTYPES["bf16"]}, architecture="hybrid"
        ),
    }


def _adapters() -> dict[str, Case]:
    """Return runs that train an adapter, unmerged; with two ranks, beside a reference that is the model without it."""
    two_ranks: Options = {**_TWO_RANKS, "ray_kwargs.ray_init.num_gpus": 2, "actor_rollout_ref.actor.use_kl_loss": True}
    narrow: Options = {"actor_rollout_ref.actor.fsdp_config.model_dtype": "bf16"}
    return {
        "sync-packed-fp32-lora": _case("sync", "packed", "fp32", **_LORA),
        "sync-dynamic-bf16-lora-of-bf16": _case("sync", "dynamic", "bf16", **_LORA, **narrow),
        "sync-packed-bf16-lora-two-ranks-kl": _case("sync", "packed", "bf16", **_LORA, **two_ranks),
        "colocate_async-padded-bf16-lora": _case("colocate_async", "padded", "bf16", **_LORA),
        "separate_async-packed-bf16-lora-nothing-ahead": _case(
            "separate_async", "packed", "bf16", **_LORA, **{_AHEAD: 0}
        ),
        "fully_async-packed-fp32-lora": _case("fully_async", "packed", "fp32", **_LORA),
        "sync-packed-fp32-lora-gdn": Case(_LORA, architecture="gdn"),
    }


def _case(mode: str, packing: str, dtype: str, **more: object) -> Case:
    return Case({**MODES[mode], **PACKINGS[packing], **DTYPES[dtype], **more}, _ENTRIES.get(mode, V1))
