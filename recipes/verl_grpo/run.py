"""Train by GRPO in verl on a CPU (`make verl-grpo`); the reward rises, and the mismatch that verl measures is 0.

It builds a tiny model and a data set, starts verl with tiny.yaml, says what it waits for, prints a line a step, and
draws the figure. verl's options are looked at before anything is built.
"""

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from samebit.recipes.settings import ARCHITECTURES
from samebit.recipes.verl_grpo.launch import Run
from samebit.recipes.verl_grpo.mismatch import MISMATCH, PAIRS, worst
from samebit.recipes.verl_grpo.progress import Progress
from samebit.recipes.verl_grpo.shapes import SHAPES

COLUMNS = {
    "step": "step",
    "critic/rewards/mean": "reward",
    "timing_s/step": "s a step",
    "samebit/generation_seconds": "generating",
    "timing_s/old_log_prob": "log-probs",
    "timing_s/update_actor": "update",
    "timing_s/update_weights": "sync",
    "training/rollout_probs_diff_max": "probs diff max",
    "rollout_corr/rollout_rs_token_k1_max": "k1 max",
    "rollout_corr/rollout_rs_token_k1_min": "k1 min",
    "samebit/on_policy/tokens_differing": "tokens that differ",
    PAIRS: "pairs that differ",
}
PARTS = (
    "samebit/generation_seconds",
    "timing_s/old_log_prob",
    "timing_s/update_actor",
    "timing_s/update_weights",
)
WIDTH = 140
"""The table has this width, also where the output is no terminal."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, train, show."""
    parser = argparse.ArgumentParser(prog="recipes/verl_grpo/run.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=16, help="GRPO steps")
    parser.add_argument("--out", type=Path, default=Path("runs/verl-grpo"), help="where everything goes")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="dense", help="of the model")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small", help="full: 4.7 M parameters, long prompts")
    parser.add_argument("options", nargs="*", help="any option of verl, as NAME=VALUE; +NAME=VALUE adds one")
    given = parser.parse_args(arguments)
    console = Console(width=max(Console().width, WIDTH))
    run = prepared(given.shape, given.out, given.steps, tuple(given.options), given.architecture)
    wanted = look_at_options(run, console)
    build(run, given.shape, given.architecture, console)
    train(run, console)
    console.print(table(run.steps()))
    figure(run, given.out / "verl-grpo.png")
    found, steps = worst(run.steps()), len(run.steps())
    console.print(f"largest mismatch of {steps} steps: {found}; metrics and figure are in {given.out}")
    if found != 0.0:
        sys.exit("error: rollout and trainer differ, or nothing was compared")
    if wanted is not None and steps < wanted:
        sys.exit(f"error: verl ended after {steps} of {wanted} steps")


def prepared(size: str, out: Path, steps: int, words: tuple[str, ...] = (), architecture: str = "dense") -> Run:
    """Return a run of one of the `SHAPES`; its data is not there yet. The experts of each token are compared."""
    shape = SHAPES[size]
    options: dict[str, object] = {**shape.options, "trainer.total_training_steps": steps}
    if architecture in ("moe", "mla"):
        options["actor_rollout_ref.rollout.custom.routed_experts"] = True
    others = [name for name, usual in ((size, "small"), (architecture, "dense")) if name != usual]
    return Run(out / "-".join(["data", *others]), out, options, num_threads=shape.num_threads, words=words)


def look_at_options(run: Run, console: Console) -> int | None:
    """Return how many steps are asked for; end the program if an option is wrong."""
    from samebit.recipes.verl_grpo.options import OptionError, checked

    console.print("looking at the options, for which verl is imported", highlight=False)
    try:
        trainer = checked(run).trainer
    except OptionError as error:
        sys.exit(f"error: {error}")
    if "file" not in trainer.logger:
        sys.exit(f"error: trainer.logger={trainer.logger} lacks 'file', which the table and the figure are made from")
    wanted: int | None = trainer.total_training_steps
    return wanted


def build(run: Run, size: str, architecture: str, console: Console) -> None:
    """Make the model and the data, or take those of an earlier run."""
    run.data.mkdir(parents=True, exist_ok=True)
    console.print(f"the model, warmed up, and the data: {run.data}", highlight=False)
    SHAPES[size].build(run.data, architecture)


def train(run: Run, console: Console) -> None:
    """Let verl run to its end; end the program if it fails."""
    console.print(f"verl is starting, which takes a minute; its log is {run.log}", highlight=False)
    code = follow(run, console)
    if code != 0:
        sys.exit(f"error: verl ended with {code}; the cause is at the end of {run.log}")


def follow(run: Run, console: Console) -> int:
    """Wait for its end, which comes with the end of this program, and say meanwhile what it does.

    Returns:
        verl's exit code.
    """
    (run.out / "metrics.jsonl").unlink(missing_ok=True)
    process = run.start()
    try:
        return _followed(run, process, console)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)


def _followed(run: Run, process: subprocess.Popen[bytes], console: Console) -> int:
    began, progress, shown = time.monotonic(), Progress(run.log), 0
    while True:
        ended = process.poll()
        steps = run.steps()
        for stage in () if shown else progress.reached():
            console.print(f"{time.monotonic() - began:4.0f} s: {stage}", highlight=False)
        for row in steps[shown:]:
            reward, seconds = row["critic/rewards/mean"], row["timing_s/step"]
            mismatch = row.get(MISMATCH[0], "not measured")
            console.print(f"step {row['step']}: reward {reward:.3f}, {seconds:.1f} s, mismatch {mismatch}")
        shown = len(steps)
        if ended is not None:
            return ended
        time.sleep(0.5)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one line a step."""
    made = Table(*COLUMNS.values())
    for row in rows:
        made.add_row(*(f"{row[name] + 0.0:.4g}" if name in row else "" for name in COLUMNS))
    return made


def figure(run: Run, path: Path) -> None:
    """Draw the reward, the parts of a step's time, and the mismatch."""
    from matplotlib.figure import Figure

    rows = run.steps()
    steps = [row["step"] for row in rows]
    drawn = Figure(figsize=(12, 3.4), layout="constrained")
    left, middle, right = drawn.subplots(1, 3)
    left.plot(steps, [row["critic/rewards/mean"] for row in rows], label="sampled")
    val = [(row["step"], value) for row in run.rows() for name, value in row.items() if name.startswith("val-core/")]
    if val:
        left.plot(*zip(*val, strict=True), "o", label="validation")
    left.set(title="reward", xlabel="step", ylim=(0, 1))
    left.legend()
    middle.stackplot(steps, *([row[name] for row in rows] for name in PARTS), labels=[COLUMNS[name] for name in PARTS])
    middle.set(title="seconds a step", xlabel="step")
    middle.legend(fontsize="small")
    for name in MISMATCH:
        right.plot(steps, [abs(row.get(name, math.nan)) for row in rows], label=COLUMNS[name])
    right.set(title="mismatch, absolute", xlabel="step")
    right.legend(fontsize="small")
    drawn.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
