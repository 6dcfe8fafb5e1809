"""`make verl-matrix`: the mismatch of many kinds of runs, as verl measures it; must be 0 everywhere.

Every run starts verl anew. What was run is kept in `OUT/NAME` and not run again; the table is written after each run,
so that it can be interrupted and taken up again.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from samebit.recipes.verl_grpo import task
from samebit.recipes.verl_grpo.launch import Run

Options = dict[str, object]
NOT_RUN, FAILED = "not run", "failed"

_WARMUP = "trainer.v1.colocate_async.num_warmup_batches"
_OFF_POLICY: Options = {"trainer.v1.sampler.custom_sampler.name": "OffPolicy"}
_SERVERS_APART: Options = {
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "samebit",
    "ray_kwargs.ray_init.num_gpus": 2,
}
MODES: dict[str, Options] = {
    "sync": {},
    "colocate_async": {"trainer.v1.trainer_mode": "colocate_async", _WARMUP: 0, **_OFF_POLICY},
    "separate_async": {
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.parameter_sync_step": 1,
        **_OFF_POLICY,
        **_SERVERS_APART,
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
EXTRAS: dict[str, Options] = {
    "colocate_async-packed-fp32-one-batch-ahead": {**MODES["colocate_async"], _WARMUP: 1},
    "sync-packed-fp32-temperature0.7": {"actor_rollout_ref.rollout.temperature": 0.7},
    "sync-padded-bf16-temperature0.7": {
        **PACKINGS["padded"],
        **DTYPES["bf16"],
        "actor_rollout_ref.rollout.temperature": 0.7,
    },
    "sync-packed-fp32-two-ranks-kl": {
        "trainer.n_gpus_per_node": 2,
        "ray_kwargs.ray_init.num_gpus": 2,
        "actor_rollout_ref.actor.use_kl_loss": True,
    },
    "sync-packed-fp32-no-checkpointing": {"actor_rollout_ref.model.enable_gradient_checkpointing": False},
    "sync-packed-fp32-two-threads": {"actor_rollout_ref.rollout.custom.num_threads": 2},
    "sync-packed-fp32-save": {"trainer.save_freq": 10},
}
MISMATCH = (
    "training/rollout_probs_diff_max",
    "rollout_corr/rollout_rs_token_k1_max",
    "rollout_corr/rollout_rs_token_k1_min",
)
FRESH = ("samebit/on_policy/tokens", "samebit/on_policy/tokens_differing")


@dataclass(frozen=True)
class Result:
    """Of one run; `state` is empty when it went through.

    stale: steps with trajectories of older weights. mismatch: of all steps without. tokens, differing: of trajectories
    sampled under the weights that were trained.
    """

    name: str
    state: str = ""
    steps: int = 0
    stale: int = 0
    mismatch: float = 0.0
    tokens: int = 0
    differing: int = 0


def cases() -> dict[str, Options]:
    """The options of every run, by its name."""
    grid = {
        f"{mode}-{packing}-{dtype}": {**MODES[mode], **PACKINGS[packing], **DTYPES[dtype]}
        for mode, packing, dtype in product(("sync", "colocate_async"), PACKINGS, DTYPES)
    }
    apart = {f"separate_async-packed-{dtype}": {**MODES["separate_async"], **DTYPES[dtype]} for dtype in DTYPES}
    return grid | apart | EXTRAS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(prog="recipes/verl_grpo/matrix.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--out", type=Path, default=Path("runs/verl-matrix"), help="what was run")
    parser.add_argument("--only", nargs="*", default=[], help="names of runs, or parts of them; all if none are given")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    console = Console()
    data = given.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    task.build(data, training=512, held_out=16, warm=False)
    for name, options in cases().items():
        wanted = not given.only or any(part in name for part in given.only)
        if wanted and read(given.out / name, name).state:
            console.print(f"{name} ...", highlight=False)
            run(Run(data, given.out / name, {**settings(given.steps), **options}))
        console.print(line(read(given.out / name, name)), highlight=False)
        (given.out / "matrix.md").write_text(table(given.out, given.steps))


def settings(steps: int) -> Options:
    """What all runs have in common: little batches, so that a step is short."""
    return {
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "data.train_batch_size": 4,
        "data.max_response_length": 24,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
    }


def run(run: Run) -> None:
    """Let it run to its end, whatever that is; if this program is ended, so is the run."""
    process = run.start()
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    (run.out / "exit").write_text(str(code))


def read(folder: Path, name: str) -> Result:
    """What a run has left."""
    if not (folder / "exit").exists():
        return Result(name, NOT_RUN)
    rows = Run(folder, folder).steps()
    if (folder / "exit").read_text() != "0" or not rows:
        return Result(name, FAILED)
    fresh = [row for row in rows if row["training/off_policy/trajectory_staleness_worst/max"] == 0]
    return Result(
        name,
        steps=len(rows),
        stale=len(rows) - len(fresh),
        mismatch=max((abs(row[metric]) for row in fresh for metric in MISMATCH), default=0.0),
        tokens=int(_total(rows, FRESH[0])),
        differing=int(_total(rows, FRESH[1])),
    )


def _total(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(row.get(name, 0.0) for row in rows))


def line(result: Result) -> str:
    """Of the table."""
    if result.state:
        return f"| {result.name} | {result.state} | | | | |"
    numbers = (result.steps, result.stale, result.mismatch, f"{result.tokens:,}", result.differing)
    return f"| {result.name} | {' | '.join(map(str, numbers))} |"


def table(out: Path, steps: int) -> str:
    """All runs, in Markdown."""
    return "\n".join(_lines(out, steps)) + "\n"


def _lines(out: Path, steps: int) -> Iterator[str]:
    yield f"Runs of {steps} steps. Mismatch: the largest of verl's `training/rollout_probs_diff_max` and the absolute"
    yield "`rollout_corr/rollout_rs_token_k1_max` and `_min`, over the steps without trajectories of older weights."
    yield "Tokens: of trajectories sampled under the weights that their step trains, each compared bit by bit."
    yield ""
    yield "| run | steps | steps with older trajectories | mismatch | tokens | that differ |"
    yield "|---|---|---|---|---|---|"
    for name in cases():
        yield line(read(out / name, name))


if __name__ == "__main__":
    main()
