"""`make verl-grpo`: GRPO in verl on a CPU; the reward rises, and the mismatch that verl measures is 0.

It builds a tiny model and a data set, starts verl with tiny.yaml, prints a line a step, and draws the figure.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from samebit.recipes.verl_grpo.launch import Run
from samebit.recipes.verl_grpo.mismatch import MISMATCH, worst
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
}
PARTS = (
    "samebit/generation_seconds",
    "timing_s/old_log_prob",
    "timing_s/update_actor",
    "timing_s/update_weights",
)
WIDTH = 140
"""Of the table, also where the output is no terminal."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, train, show."""
    parser = argparse.ArgumentParser(prog="recipes/verl_grpo/run.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=16, help="GRPO steps")
    parser.add_argument("--out", type=Path, default=Path("runs/verl-grpo"), help="where everything goes")
    parser.add_argument("--architecture", choices=("dense", "hybrid"), default="dense", help="of the model")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="full: 4.7 M parameters, long prompts; else small")
    parser.add_argument("--compare", action="store_true", help="run the full shape again, with Hugging Face's generate")
    parser.add_argument("options", nargs="*", help="any option of verl, as NAME=VALUE")
    given = parser.parse_args(arguments)
    console = Console(width=max(Console().width, WIDTH))
    size = given.shape or ("full" if given.compare else "small")
    shape = SHAPES[size]
    data = given.out / ("data" if size == "small" else f"data-{size}")
    data.mkdir(parents=True, exist_ok=True)
    shape.build(data, given.architecture)
    options: dict[str, object] = {**shape.options, "trainer.total_training_steps": given.steps}
    options |= dict(option.split("=", 1) for option in given.options)
    run = Run(data, given.out, options, num_threads=shape.num_threads)
    console.print(f"verl is starting; its log is {run.log}", highlight=False)
    code = follow(run, console)
    if code != 0:
        sys.exit(f"error: verl ended with {code}; the cause is at the end of {run.log}")
    console.print(table(run.steps()))
    figure(run, given.out / "verl-grpo.png")
    if given.compare:
        options["actor_rollout_ref.rollout.custom.generate_with"] = "huggingface"
        other = Run(data, given.out / "huggingface", options, num_threads=shape.num_threads)
        console.print("the same with Hugging Face's generate", highlight=False)
        if follow(other, console) != 0:
            sys.exit(f"error: the cause is at the end of {other.log}")
        console.print(comparison(run.steps(), other.steps()))
    found, steps = worst(run.steps()), len(run.steps())
    console.print(f"largest mismatch of {steps} steps: {found}; metrics and figure are in {given.out}")
    if found != 0.0:
        sys.exit("error: rollout and trainer differ, or nothing was compared")
    wanted = int(str(options["trainer.total_training_steps"]))
    if steps < wanted:
        sys.exit(f"error: verl ended after {steps} of {wanted} steps")


def follow(run: Run, console: Console) -> int:
    """Wait for its end, and say what every step brought meanwhile; verl's exit code."""
    (run.out / "metrics.jsonl").unlink(missing_ok=True)
    process = run.start()
    shown = 0
    while True:
        ended = process.poll()
        steps = run.steps()
        for row in steps[shown:]:
            reward, seconds = row["critic/rewards/mean"], row["timing_s/step"]
            mismatch = row["training/rollout_probs_diff_max"]
            console.print(f"step {row['step']}: reward {reward:.3f}, {seconds:.1f} s, mismatch {mismatch}")
        shown = len(steps)
        if ended is not None:
            return ended
        time.sleep(0.5)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a step."""
    made = Table(*COLUMNS.values())
    for row in rows:
        made.add_row(*(f"{row[name] + 0.0:.4g}" if name in row else "" for name in COLUMNS))
    return made


def comparison(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Table:
    """Medians of a step's parts, without the first step, in which things are started and compiled."""
    made = Table("median seconds a step", "samebit", "Hugging Face generate", "times")
    for name in ("timing_s/step", *PARTS):
        here, there = (median(row[name] for row in rows[1:]) for rows in (ours, theirs))
        made.add_row(COLUMNS[name], f"{here:.3f}", f"{there:.3f}", f"{there / here:.2f}")
    return made


def figure(run: Run, path: Path) -> None:
    """Reward, where a step's time goes, and the mismatch."""
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
        right.plot(steps, [abs(row[name]) for row in rows], label=COLUMNS[name])
    right.set(title="mismatch, absolute", xlabel="step")
    right.legend(fontsize="small")
    drawn.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
