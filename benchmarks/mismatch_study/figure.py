"""Draw what the arms of a study wrote, and print the figure that they are judged by.

    python benchmarks/mismatch_study/figure.py FOLDER

FOLDER: the study's OUT, or a folder of results/mismatch_study; study.png is written there.
"""

# isort: split
import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich import box
from rich.console import Console
from rich.table import Table

from samebit.recipes.metrics import Row

PANELS = {
    "val/accuracy": "greedy accuracy, held out",
    "training/rollout_logprobs_diff_mean": "mean |rollout logprob - trainer logprob|",
    "actor/grad_norm": "gradient norm",
    "actor/entropy_of_samples": "entropy of the samples, nats",
}

PARTS: dict[str, Callable[[Row], float]] = {
    "sampling": lambda row: row["perf/time_generate"],
    "new weights": lambda row: row["perf/time_sync"],
    "log-probabilities": lambda row: row["perf/time_logprobs"],
    "training": lambda row: row["perf/time_train"] - row["perf/time_sync"],
}
"""Parts of a step, in seconds. The log-probabilities are those that an exact rollout spares: a pass over all samples in
the other arms, in the exact ones over those of groups that agree, to compare them."""

Runs = dict[str, list[Row]]


def read(folder: Path) -> Runs:
    """Return the rows of each arm that has any, by name."""
    files = sorted(folder.glob("*/metrics.jsonl"))
    return {path.parent.name: [json.loads(line) for line in path.read_text().splitlines()] for path in files}


def draw(folder: Path) -> None:
    """Write study.png: a line an arm, the mean over its seeds; the band shows the extremes."""
    runs = read(folder)
    canvas, grid = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    for axes, (name, title) in zip(grid.flat, PANELS.items(), strict=True):
        for arm, rows in runs.items():
            _line(axes, rows, name, arm)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
    grid.flat[0].legend(fontsize="small")
    canvas.savefig(folder / "study.png", dpi=120)
    plt.close(canvas)


def table(folder: Path) -> Table:
    """Return a line an arm: what it is judged by, and how far its sampler was from the trainer."""
    result = Table(title="greedy accuracy on the held-out problems at the last step", box=box.SIMPLE_HEAD)
    for title in ("arm", "seeds", "steps", "accuracy", "extremes", "mean difference", "KL (k3)", "tokens that differ"):
        result.add_column(title, justify="left" if title == "arm" else "right", no_wrap=title == "arm")
    for arm, rows in read(folder).items():
        result.add_row(arm, *_cells(rows))
    return result


def paired_table(folder: Path) -> Table:
    """Return a line an arm: its accuracy less that of `exact` in the same seeds, which have easy and hard problems.

    At the last step, and in the mean over the evaluations of the last third: one evaluation has luck in it.
    """
    result = Table(title="greedy accuracy less that of exact, the same seeds", box=box.SIMPLE_HEAD)
    for title in ("arm", "seeds", "steps", "at the last step", "mean of the last third"):
        result.add_column(title, justify="left" if title == "arm" else "right", no_wrap=title == "arm")
    runs = read(folder)
    exact = _accuracies(runs.pop("exact", []))
    for arm, rows in runs.items():
        apart = {key: value - exact[key] for key, value in _accuracies(rows).items() if key in exact}
        if apart:
            result.add_row(arm, *_paired_cells(apart))
    return result


def seconds_table(folder: Path) -> Table:
    """Return a line an arm: the median seconds of the parts of a step, and of the four together."""
    result = Table(title="seconds a step, medians", box=box.SIMPLE_HEAD)
    for title in ("arm", *PARTS, "step"):
        result.add_column(title, justify="left" if title == "arm" else "right", no_wrap=title == "arm")
    for arm, rows in read(folder).items():
        steps = [[part(row) for part in PARTS.values()] for row in rows if row["step"]]
        parts = [median(values) for values in zip(*steps, strict=True)]
        result.add_row(arm, *(f"{value:.2f}" for value in (*parts, median(map(sum, steps)))))
    return result


def _cells(rows: Sequence[Row]) -> list[str]:
    steps = int(max(row["step"] for row in rows))
    last = [row["val/accuracy"] for row in rows if row["step"] == steps and "val/accuracy" in row]
    learned = [row for row in rows if row["step"]]
    differing = mean(row["training/tokens_differing"] / row["training/tokens_compared"] for row in learned)
    divergence = [row["actor/ppo_kl"] for row in learned if "actor/ppo_kl" in row]
    return [
        f"{len(last)}",
        f"{steps}",
        f"{mean(last):.3f}",
        f"{min(last):.3f} to {max(last):.3f}",
        f"{mean(row['training/rollout_logprobs_diff_mean'] for row in learned):.2g}",
        f"{mean(divergence):.2g}",
        f"{differing:.1%}",
    ]


def _accuracies(rows: Sequence[Row]) -> dict[tuple[int, int], float]:
    """Return the accuracies by seed and step."""
    return {(int(row["seed"]), int(row["step"])): row["val/accuracy"] for row in rows if "val/accuracy" in row}


def _paired_cells(apart: dict[tuple[int, int], float]) -> list[str]:
    steps = max(step for _, step in apart)
    last = [value for (_, step), value in apart.items() if step == steps]
    late = [value for (_, step), value in apart.items() if 3 * step >= 2 * steps]
    return [f"{len(last)}", f"{steps}", f"{mean(last):+.3f}", f"{mean(late):+.3f}"]


def _line(axes: Axes, rows: Sequence[Row], name: str, arm: str) -> None:
    steps = sorted({int(row["step"]) for row in rows if name in row})
    values = [[row[name] for row in rows if row["step"] == step and name in row] for step in steps]
    (line,) = axes.plot(steps, [mean(one) for one in values], label=arm)
    axes.fill_between(
        steps, [min(one) for one in values], [max(one) for one in values], color=line.get_color(), alpha=0.15
    )


def show(folder: Path, console: Console) -> None:
    """Write study.png, and print the three tables."""
    draw(folder)
    console.print(table(folder))
    console.print(seconds_table(folder))
    console.print(paired_table(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    show(parser.parse_args().folder, Console())


if __name__ == "__main__":
    main()
