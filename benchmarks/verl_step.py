"""Measure a step of verl's trainer with samebit as its rollout, and with Hugging Face's `generate` in its place.

    .venv/bin/python benchmarks/verl_step.py --steps 12

It is `make verl-grpo ARGS="--shape full"` twice; the second run differs in what is inside the servers.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from samebit.benchmarks.contestants import verl_contestant
from samebit.recipes.verl_grpo.launch import Run
from samebit.recipes.verl_grpo.mismatch import worst
from samebit.recipes.verl_grpo.run import COLUMNS, PARTS, build, prepared, train
from samebit.recipes.verl_grpo.shapes import SHAPES


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks/verl_step.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--out", type=Path, default=Path("runs/verl-step"), help="where everything goes")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="full", help="see recipes/verl_grpo/shapes.py")
    given = parser.parse_args(arguments)
    console = Console()
    ours = prepared(given.shape, given.out, given.steps)
    theirs = with_hugging_face(ours)
    build(ours, given.shape, "dense", console)
    for name, run in (("samebit", ours), ("Hugging Face's generate", theirs)):
        console.print(f"with {name}", highlight=False)
        train(run, console)
        console.print(f"largest mismatch: {worst(run.steps())}", highlight=False)
    console.print(comparison(ours.steps(), theirs.steps()))


def with_hugging_face(run: Run) -> Run:
    """Return the same run with the other worker in its servers."""
    return replace(
        run,
        out=run.out / "huggingface",
        options={**run.options, "actor_rollout_ref.rollout.name": verl_contestant.NAME},
        variables={"VERL_USE_EXTERNAL_MODULES": verl_contestant.__name__},
    )


def comparison(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Table:
    """Return medians of a step's parts, without the first step, in which things are started and compiled."""
    made = Table("median seconds a step", "samebit", "Hugging Face generate", "times")
    for name in ("timing_s/step", *PARTS):
        here, there = (median(row[name] for row in rows[1:]) for rows in (ours, theirs))
        made.add_row(COLUMNS[name], f"{here:.3f}", f"{there:.3f}", f"{there / here:.2f}")
    return made


if __name__ == "__main__":
    main()
