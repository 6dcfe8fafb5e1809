"""Show figures to people: a table in the terminal and a picture."""

from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table

from samebit.benchmarks.rounds.turns import Spread

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_SPEED = "tokens_per_second_"
_CASES = {
    "_5m": "5 M, float32",
    "_5m_bf16": "5 M, bfloat16",
    "_100m": "100 M, float32",
    "_100m_bf16": "100 M, bfloat16",
}
_NAMES = {
    "samebit": "samebit (exact)",
    "samebit_inexact": "samebit, exact=False",
    "hf_generate": "HF generate",
    "hf_continuous_tuned": "HF continuous batching, tuned",
    "hf_continuous": "HF continuous batching",
}


def show(metrics: dict[str, Spread]) -> None:
    table = Table("figure", "median", "min", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, value in metrics.items():
        table.add_row(name, *(_short(number) for number in (value.value, value.min, value.max)))
    Console().print(table)


def plot(path: Path, metrics: dict[str, Spread]) -> None:
    """Draw the tokens per second of each contestant, a panel a case; bars are medians, lines the spread."""
    panels = {suffix: _bars(metrics, suffix) for suffix in _CASES if _bars(metrics, suffix)}
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 2.6), squeeze=False, layout="constrained")
    for axis, (suffix, bars) in zip(axes[0], panels.items(), strict=True):
        for position, (name, speed) in enumerate(bars.items()):
            error = [[speed.value - speed.min], [speed.max - speed.value]]
            color = "tab:blue" if name.startswith("samebit") else "tab:gray"
            axis.barh(position, speed.value, xerr=error, color=color, alpha=0.6 if "False" in name else 1)
            axis.text(speed.max, position, f"  {speed.value:,.0f}", va="center", fontsize=8)
        axis.set_yticks(range(len(bars)), list(bars), fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.set_title(_CASES[suffix], fontsize=10)
        axis.set_xlabel("output tokens / s", fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _bars(metrics: dict[str, Spread], suffix: str) -> dict[str, Spread]:
    found = {label: metrics.get(f"{_SPEED}{name}{suffix}") for name, label in _NAMES.items()}
    return {label: value for label, value in found.items() if value is not None}


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
