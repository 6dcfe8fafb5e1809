"""Show how far engines are from trainers: a table in the terminal, one in Markdown, and a picture."""

from dataclasses import dataclass
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table

from samebit.benchmarks.rounds.turns import Spread

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_SIDES = {"fp32": "float32", "bf16": "bfloat16"}
_WAYS = {
    "vllm_cold": "vLLM, batch, cold cache",
    "vllm_warm": "vLLM, batch, warm cache",
    "vllm_batch_1": "vLLM, one by one",
    "vllm_chunked": "vLLM, chunks of 96",
    "hf_batch": "Hugging Face generate, batch",
    "hf_batch_1": "Hugging Face generate, one by one",
    "trl": "TRL's scores of generate's tokens",
    "trl_vllm": "TRL's scores of vLLM's tokens",
    "hf_forward": "Hugging Face forward, one by one",
    "samebit_cold": "samebit, batch, cold cache",
    "samebit_warm": "samebit, batch, warm cache",
    "samebit_batch_1": "samebit, one by one",
    "samebit_chunked": "samebit, chunks of 96",
}


@dataclass(frozen=True)
class Row:
    """Holds the figures of one way of one engine, in `dtype`, on one kind of model, beside a trainer in `trainer`."""

    kind: str
    way: str
    dtype: str
    trainer: str
    tokens: float
    differ: float
    mean: float
    largest: float
    k3: float
    cached: float

    @property
    def cells(self) -> tuple[str, ...]:
        sides = (_SIDES[self.dtype], _SIDES[self.trainer])
        share = f"{self.differ:,.0f} of {self.tokens:,.0f}"
        figures = map(_short, (self.mean, self.largest, self.k3))
        return (self.kind, _WAYS[self.way], *sides, f"{self.cached:.0%}", share, *figures)


_TITLES = ("model", "rollout", "in", "trainer in", "cached", "tokens that differ", "mean", "largest", "k3")


def rows(metrics: dict[str, Spread]) -> list[Row]:
    """Return a row for each comparison, models first, then dtypes, then ways."""
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        comparison, _, figure = name.rpartition("_")
        found.setdefault(comparison, {})[figure] = value.value
    made = [Row(*_named(name), **figures) for name, figures in found.items()]
    kinds = list(dict.fromkeys(row.kind for row in made))
    sides, ways = list(_SIDES), list(_WAYS)
    return sorted(
        made,
        key=lambda row: (
            kinds.index(row.kind), sides.index(row.dtype), -sides.index(row.trainer), ways.index(row.way)
        ),
    )  # fmt: skip


def show(report: list[Row]) -> None:
    table = Table(*_TITLES)
    for row in report:
        table.add_row(*row.cells)
    Console(width=140).print(table)


def markdown(report: list[Row]) -> str:
    """Return the table, a line a row."""
    lines = [_TITLES, ("---",) * len(_TITLES), *(row.cells for row in report)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def plot(path: Path, report: list[Row]) -> None:
    """Draw the mean difference of each way, a line of panels for each model, one for each dtype and trainer's dtype."""
    kinds = list(dict.fromkeys(row.kind for row in report))
    sides = list(dict.fromkeys((row.dtype, row.trainer) for row in report))
    figure, axes = plt.subplots(
        len(kinds), len(sides), figsize=(5.2 * len(sides), 2.7 * len(kinds)), squeeze=False, layout="constrained"
    )
    for line, kind in enumerate(kinds):
        for column, (dtype, trainer) in enumerate(sides):
            shown = [row for row in report if (row.kind, row.dtype, row.trainer) == (kind, dtype, trainer)]
            beside = "" if dtype == trainer else f" beside Hugging Face's {_SIDES[trainer]}"
            _panel(axes[line][column], shown, f"{kind}, {_SIDES[dtype]}{beside}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(axis: plt.Axes, shown: list[Row], title: str) -> None:
    least = min((row.mean for row in shown if row.mean), default=1e-9) / 4
    for position, row in enumerate(shown):
        color = "tab:blue" if row.way.startswith("samebit") else "tab:gray"
        if row.mean:
            axis.barh(position, row.mean, left=0, color=color)
            axis.plot([row.mean, row.largest], [position, position], color=color, linewidth=1)
        axis.text(row.largest or least, position, f"  {_short(row.mean)}", va="center", fontsize=7, color=color)
    axis.set_yticks(range(len(shown)), [_WAYS[row.way] for row in shown], fontsize=7)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(least, max((row.largest for row in shown), default=1.0) * 20 or 1.0)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("nats: mean (bar), largest (line)", fontsize=7)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def _named(name: str) -> tuple[str, str, str, str]:
    """Take `dense_bf16_vllm_cold_vs_fp32` apart."""
    head, _, trainer = name.partition("_vs_")
    kind, dtype, way = head.split("_", 2)
    return kind, way, dtype, trainer


def _short(number: float) -> str:
    return "0" if number == 0 else f"{number:.2g}"
