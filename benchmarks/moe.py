"""Measure what routed experts cost: samebit and Hugging Face, a layer beside `grouped_mm`, growth with the experts.

    python benchmarks/moe.py [--json FILE] [--rounds N] [--quick]

README.md in this folder defines each number.
"""

import samebit.kernels

# isort: split
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from samebit.benchmarks.contestants.expert_layers import ExpertLayers, Pass
from samebit.benchmarks.contestants.huggingface import hf_generate
from samebit.benchmarks.contestants.samebit_worker import samebit
from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Calibration, Round, Spread, Turn, alternate, is_steady, kept, ratio, spread
from samebit.benchmarks.workloads import models
from samebit.benchmarks.workloads.workload import Run, Workload


@dataclass(frozen=True)
class Sizes:
    """Sets the size of the measurement of layers.

    rows: of a call. few, many: the experts between which growth is measured; a model of few has more layers, so that
    both have as many weights. turn_rows: rows that a turn computes at least, those of each layer counted: a short turn
    would be one of caches that another contestant has filled.
    """

    rows: tuple[int, ...] = (64, 2000)
    few: int = 8
    many: int = 256
    turn_rows: int = 5120
    rounds: int = 15


class Comparison:
    """Lets contestants take turns and remembers how many rounds were disturbed."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.rounds: list[Round] = []

    def run(self, turns: dict[str, Turn], rounds: int) -> list[Round]:
        """Return the steady rounds."""
        measured = alternate(turns, rounds, self.calibration)
        self.rounds += measured
        return kept(measured, self.calibration)

    @property
    def disturbed(self) -> int:
        return sum(not is_steady(one, self.calibration) for one in self.rounds)


def rollouts(
    shape: dict[str, Any], dtype: str, workload: Workload, rounds: int, comparison: Comparison
) -> dict[str, Spread]:
    """Compare output tokens per second with Hugging Face's, prefill included, and with the engine that is not exact."""
    model = models.build_experts(shape, models.DTYPES[dtype], workload.prompt_tokens + workload.new_tokens)
    vocab_size = shape["vocab_size"]

    def turn(name: str, run: Run) -> Turn:
        run(workload.make_prompts(vocab_size, seed=10**6)[:2], 8)  # compiles samebit's kernels
        return workload.turn(name, run, vocab_size)

    with ExitStack() as stack:
        exact, inexact = (stack.enter_context(samebit(model, workload, exact=exact))[0] for exact in (True, False))
        runs = {"samebit": exact, "hf_generate": hf_generate(model, workload), "samebit_inexact": inexact}
        steady = comparison.run({name: turn(name, run) for name, run in runs.items()}, rounds)
    suffix = _suffix(dtype)
    return {
        f"ratio_vs_hf_generate_moe{suffix}": ratio(steady, "hf_generate", "samebit"),
        f"exact_tax_moe{suffix}": ratio(steady, "samebit", "samebit_inexact"),
        **{
            f"tokens_per_second_{name}_moe{suffix}": spread(
                [workload.output_tokens / one.seconds[name] for one in steady]
            )
            for name in runs
        },
    }


def layers(shape: dict[str, Any], dtype: str, sizes: Sizes, comparison: Comparison) -> dict[str, Spread]:
    """Compare the layers of the model with those of Hugging Face, router included."""
    metrics: dict[str, Spread] = {}
    contestants = ExpertLayers(shape, models.DTYPES[dtype])
    for rows in sizes.rows:
        contestants.check(rows)
        runs = {"samebit": contestants.samebit, "grouped_mm": contestants.grouped_mm}
        turns = {name: _turn(contestants, run(rows), rows, sizes) for name, run in runs.items()}
        steady = comparison.run(turns, sizes.rounds)
        metrics[f"layer_over_grouped_mm_{rows}{_suffix(dtype)}"] = ratio(steady, "samebit", "grouped_mm")
        metrics[f"layer_ms_{rows}{_suffix(dtype)}"] = spread([1e3 * one.seconds["samebit"] for one in steady])
    return metrics


def growth(shape: dict[str, Any], dtype: str, sizes: Sizes, comparison: Comparison) -> dict[str, Spread]:
    """Return the time of a layer of many experts over that of one of few; a row has as many in both."""
    few, many = (
        ExpertLayers({**shape, "num_experts": count, "num_hidden_layers": number}, models.DTYPES[dtype])
        for count, number in ((sizes.few, sizes.many // sizes.few // 4), (sizes.many, 1))
    )
    metrics: dict[str, Spread] = {}
    ways: dict[str, Callable[[ExpertLayers, int], Pass]] = {
        "layer_growth": lambda side, rows: side.samebit(rows),
        "layer_growth_same_experts": lambda side, rows: side.samebit_among(rows, sizes.few),
        "grouped_mm_growth": lambda side, rows: side.grouped_mm(rows),
    }
    for rows in sizes.rows:
        for name, way in ways.items():
            turns = {key: _turn(side, way(side, rows), rows, sizes) for key, side in (("few", few), ("many", many))}
            steady = comparison.run(turns, sizes.rounds)
            metrics[f"{name}_{rows}{_suffix(dtype)}"] = ratio(steady, "many", "few")
    return metrics


def _turn(contestants: ExpertLayers, run: Pass, rows: int, sizes: Sizes) -> Turn:
    contestants.seconds(run, 1)  # compiles
    passes = max(1, sizes.turn_rows // (rows * contestants.layers))
    return lambda _: contestants.seconds(run, passes)


def _suffix(dtype: str) -> str:
    return "" if dtype == "fp32" else f"_{dtype}"


def measure(
    shape: dict[str, Any], workload: Workload, sizes: Sizes, rounds: int, comparison: Comparison
) -> dict[str, Spread]:
    """Return all figures, those of the layers first."""
    metrics: dict[str, Spread] = {}
    for part in (layers, growth):
        for dtype in models.DTYPES:
            metrics |= part(shape, dtype, sizes, comparison)
    for dtype in models.DTYPES:
        metrics |= rollouts(shape, dtype, workload, rounds, comparison)
    return metrics


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=4, of="whole rollouts")
    parser.add_argument("--quick", action="store_true", help="one round of whole rollouts, three of everything else")
    args = parser.parse_args()
    shape, workload, sizes, comparison = models.EXPERTS, Workload(), Sizes(), Comparison()
    load_before = results_file.load_average()
    if args.quick:
        sizes, args.rounds = replace(sizes, rounds=3), 1
    metrics = measure(shape, workload, sizes, args.rounds, comparison)
    table.show(metrics)
    print(f"{comparison.disturbed} of {len(comparison.rounds)} rounds disturbed; their figures are dropped")
    if args.json:
        meta = results_file.describe(
            workload=vars(workload), sizes=vars(sizes), model=shape, load_before=load_before,
            rounds=len(comparison.rounds), rounds_disturbed=comparison.disturbed,
        )  # fmt: skip
        results_file.write(args.json, meta, metrics)


if __name__ == "__main__":
    main()
