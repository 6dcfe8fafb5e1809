"""Show a finished run: the table on the terminal and reward.png."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from rich import box
from rich.table import Table

from samebit.recipes.metrics import Row

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

TRAINING = {"perf/time_train": "training", "perf/time_logprobs": "log-probabilities only"}
DIFF = "training/rollout_logprobs_diff_max"

MOST_BARS = 500
"""A picture has no room for more, and matplotlib takes 9 KB for each of three names."""


def table(rows: Sequence[Row]) -> Table:
    """Return a table with a line an evaluation; mismatch, tokens and seconds cover all steps since the line before."""
    result = Table(
        title="GRPO; mismatch is max |rollout logprob - trainer logprob|",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for title in ("seed", "step", "greedy", "sampled", "working", "mismatch", "tokens", "gen s", "train s"):
        result.add_column(title, justify="right", no_wrap=True)
    since: list[Row] = []
    for row in rows:
        since.append(row)
        if "val/accuracy" in row:
            result.add_row(*_cells(row, [r for r in since if DIFF in r]))
            since = []
    return result


def verdict(rows: Sequence[Row]) -> str:
    """Return the claim in one sentence, from the numbers."""
    worst = max(row[DIFF] for row in rows if DIFF in row)
    return f"max |rollout logprob - trainer logprob| = {worst}: {differing(rows)}"


def differing(rows: Sequence[Row]) -> str:
    """Return the number of compared tokens with a different bit pattern."""
    compared = sum(row["training/tokens_compared"] for row in rows if DIFF in row)
    count = sum(row["training/tokens_differing"] for row in rows if DIFF in row)
    return f"{count} of {compared:,} tokens differ"


def figure(rows: Sequence[Row], path: Path) -> None:
    """Draw accuracy, share of samples with working, mismatch, time, and how far off policy; one line a seed."""
    panels = [_accuracy, _working, _mismatch, _times]
    if any(row.get("staleness/max", 0) for row in rows):
        panels += [_staleness, _clipping]
    canvas, grid = plt.subplots(len(panels) // 2, 2, figsize=(11, 3.5 * len(panels) // 2), layout="constrained")
    for axes, draw in zip(grid.flat, panels, strict=True):
        draw(axes, rows)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:  # empty where no seed learned anything
            axes.legend(loc="best", fontsize="small")
    canvas.savefig(path, dpi=120)
    plt.close(canvas)


def _accuracy(axes: Axes, rows: Sequence[Row]) -> None:
    _lines(axes, rows, "val/accuracy", "greedy, held out", marker="o")
    _lines(axes, rows, "reward/mean", "sampled, training", linestyle=":")
    axes.set(title="Accuracy", ylim=(0, 1.04))


def _working(axes: Axes, rows: Sequence[Row]) -> None:
    _lines(axes, rows, "val/share_with_working", "greedy, held out", marker="o")
    _lines(axes, rows, "reward/share_with_working", "sampled, training", linestyle=":")
    axes.set(title="Share of answers with working", ylim=(0, 1.04))


def _mismatch(axes: Axes, rows: Sequence[Row]) -> None:
    _lines(axes, rows, DIFF, "largest in the step")
    axes.set(title=f"|rollout logprob - trainer logprob|: {differing(rows)}")
    if not any(row[DIFF] for row in rows if DIFF in row):
        axes.set_ylim(-1e-6, 1e-6)


def _staleness(axes: Axes, rows: Sequence[Row]) -> None:
    _lines(axes, rows, "staleness/mean", "mean of the step's tokens")
    axes.set(title="Updates between sampling a token and learning from it")
    axes.set_ylim(bottom=0)


def _clipping(axes: Axes, rows: Sequence[Row]) -> None:
    _lines(axes, rows, "actor/pg_clipfrac", "tokens clipped")
    _lines(axes, rows, "actor/ppo_kl", "KL(rollout, trainer)", linestyle=":")
    axes.set(title="Off policy: share of tokens clipped, KL divergence")


def _cells(row: Row, since: Sequence[Row]) -> list[str]:
    head = [f"{row['seed']}", f"{row['step']}", f"{row['val/accuracy']:.3f}"]
    if not since:
        return [*head, "", f"{row['val/share_with_working']:.3f}", "", "", "", ""]
    return [
        *head,
        f"{since[-1]['reward/mean']:.3f}",
        f"{row['val/share_with_working']:.3f}",
        f"{max(r[DIFF] for r in since)}",
        f"{sum(r['training/tokens_compared'] for r in since):,}",
        f"{sum(r['perf/time_generate'] for r in since):.1f}",
        f"{sum(r['perf/time_train'] + r['perf/time_logprobs'] for r in since):.1f}",
    ]


def _seeds(rows: Sequence[Row]) -> list[int]:
    return sorted({int(row["seed"]) for row in rows})


def _lines(axes: Axes, rows: Sequence[Row], name: str, label: str, marker: str = "", linestyle: str = "-") -> None:
    for color, seed in enumerate(_seeds(rows)):
        points = [(row["step"], row[name]) for row in rows if row["seed"] == seed and name in row]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, f"C{color}", marker=marker, linestyle=linestyle, label=f"{label}, seed {seed}")


def _times(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw what the trainer waits for at the bottom, and a rollout that runs beside it as a separate line."""
    overlapped = any("perf/time_wait" in row for row in rows)
    first = {"perf/time_wait": "waiting for samples"} if overlapped else {"perf/time_generate": "rollout"}
    width, bars = _bars([row for row in rows if "perf/time_generate" in row])
    places = [(bar[0]["step"] + bar[-1]["step"]) / 2 for bar in bars]
    bottom = [0.0] * len(bars)
    for name, label in {**first, **TRAINING}.items():
        means = _means(bars, name)
        axes.bar(places, means, 0.8 * width, bottom=bottom, label=label)
        bottom = [low + mean for low, mean in zip(bottom, means, strict=True)]
    if overlapped:
        axes.plot(places, _means(bars, "perf/time_generate"), "k.", label="rollout, beside it")
    axes.set(title=f"Seconds a step (mean of the seeds{f', and of {width} steps' if width > 1 else ''})")


def _bars(rows: Sequence[Row]) -> tuple[int, list[list[Row]]]:
    """Return how many steps share a bar, one unless there are many, and the rows of each bar in order of the steps."""
    by_step: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_step[int(row["step"])].append(row)
    steps = sorted(by_step)
    width = max(-(-len(steps) // MOST_BARS), 1)
    parts = [steps[first : first + width] for first in range(0, len(steps), width)]
    return width, [[row for step in part for row in by_step[step]] for part in parts]


def _means(bars: Sequence[Sequence[Row]], name: str) -> list[float]:
    return [_mean([row[name] for row in bar]) for bar in bars]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
