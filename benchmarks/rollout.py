"""Measure the output tokens per second of samebit beside Hugging Face, and what a samebit step is made of.

    python benchmarks/rollout.py [--json FILE] [--plot FILE] [--rounds N] [--quick]

README.md in this folder defines each number.
"""

import samebit.kernels  # before torch: see samebit.kernels.openmp

# isort: split
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from samebit.benchmarks.contestants import floor
from samebit.benchmarks.contestants.huggingface import (
    LIKE_SAMEBIT,
    TUNED,
    continuous_available,
    hf_continuous,
    hf_generate,
)
from samebit.benchmarks.contestants.samebit_worker import samebit
from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import (
    Calibration,
    Round,
    Spread,
    Turn,
    alternate,
    is_steady,
    kept,
    ratio,
    spread,
)
from samebit.benchmarks.workloads import models
from samebit.benchmarks.workloads.workload import Run, Workload
from samebit.rollout import RolloutWorker


@dataclass(frozen=True)
class Case:
    """Holds a model in a dtype, and how many rounds each comparison gets (0: not measured).

    generate: samebit, `generate`; with `tax` also samebit with exact=False. continuous: samebit and
    both settings of continuous batching.
    """

    shape: str
    dtype: str
    generate: int = 0
    tax: bool = False
    tuned: int = 0
    continuous: int = 0
    floor: int = 0

    @property
    def suffix(self) -> str:
        return f"_{self.shape}" + ("" if self.dtype == "fp32" else f"_{self.dtype}")


@dataclass
class Measured:
    """Holds everything that was timed for one case; figures are made of it when all cases are done."""

    case: Case
    generate: list[Round] = field(default_factory=list)
    tuned: list[Round] = field(default_factory=list)
    continuous: list[Round] = field(default_factory=list)
    overhead: list[float] = field(default_factory=list)
    steps: list[floor.StepTimes] = field(default_factory=list)


def plan(rounds: int, quick: bool) -> list[Case]:
    if quick:
        return [Case("5m", "fp32", generate=2, tax=True, tuned=1, floor=1)]
    few = max(1, rounds - 1)
    return [
        Case("5m", "fp32", generate=rounds, tax=True, tuned=few, continuous=few, floor=2),
        Case("5m", "bf16", generate=few, tuned=1, floor=1),
        Case("100m", "fp32", generate=few),
        Case("100m", "bf16", generate=1),
    ]


def measure(case: Case, workload: Workload, calibration: Calibration) -> Measured:
    """Warm everybody up, then run the rounds of this case."""
    model = models.build(
        models.SHAPES[case.shape], models.DTYPES[case.dtype], workload.prompt_tokens + workload.new_tokens
    )
    vocab_size = model.config.vocab_size
    measured = Measured(case)

    def turn(name: str, run: Run) -> Turn:
        run(workload.make_prompts(vocab_size, seed=10**6)[:2], 8)  # compiles samebit's kernels, fills the allocators
        return workload.turn(name, run, vocab_size)

    with ExitStack() as stack:
        run, worker = stack.enter_context(samebit(model, workload, exact=True))
        ours = turn("samebit", run)
        turns = {"samebit": _with_overhead(ours, worker, measured.overhead)}
        turns["hf_generate"] = turn("hf_generate", hf_generate(model, workload))
        if case.tax:
            inexact, _ = stack.enter_context(samebit(model, workload, exact=False))
            turns["samebit_inexact"] = turn("samebit_inexact", inexact)
        measured.generate = alternate(turns, case.generate, calibration)
        for name, settings, rounds in (("tuned", TUNED, case.tuned), ("continuous", LIKE_SAMEBIT, case.continuous)):
            if rounds and continuous_available():
                peer = turn(f"hf_{name}", hf_continuous(model, workload, settings))
                vars(measured)[name] = alternate({"samebit": ours, f"hf_{name}": peer}, rounds, calibration)
    if case.floor:
        stepped = floor.SteppedRollout(model, workload)
        measured.steps = [stepped.rollout(workload.make_prompts(vocab_size, seed)) for seed in range(case.floor + 1)][
            1:
        ]
    return measured


def _with_overhead(turn: Turn, worker: RolloutWorker, shares: list[float]) -> Turn:
    """Return the turn, noting what share of the worker's step time was neither model nor sampler."""

    def once(number: int) -> float:
        before = worker.stats()
        seconds = turn(number)
        after = worker.stats()
        step, forward, sampler = (after[k] - before[k] for k in ("step_seconds", "forward_seconds", "sampler_seconds"))
        shares.append(1 - (forward + sampler) / step)
        return seconds

    return once


def figures(measured: Measured, workload: Workload, calibration: Calibration) -> dict[str, Spread]:
    """Return all figures of one case, from its steady rounds."""
    suffix = measured.case.suffix
    dtype_suffix = suffix.removeprefix(f"_{measured.case.shape}")
    out: dict[str, Spread] = {}
    rounds = kept(measured.generate, calibration)
    out[f"ratio_vs_hf_generate{suffix}"] = ratio(rounds, "hf_generate", "samebit")
    for name in rounds[0].seconds:
        out[f"tokens_per_second_{name}{suffix}"] = _tokens_per_second(rounds, name, workload)
    for name, metric, all_rounds in (
        ("hf_continuous", "ratio_vs_hf_continuous", measured.continuous),
        ("hf_tuned", "ratio_vs_hf_continuous_tuned", measured.tuned),
    ):
        if all_rounds:
            steady = kept(all_rounds, calibration)
            out[f"{metric}{suffix}"] = ratio(steady, name, "samebit")
            speed = metric.replace("ratio_vs", "tokens_per_second")
            out[f"{speed}{suffix}"] = _tokens_per_second(steady, name, workload)
    if measured.case.tax:
        out[f"exact_tax{dtype_suffix}"] = ratio(rounds, "samebit", "samebit_inexact")
    if measured.case.shape == "5m":
        out[f"engine_overhead_share{dtype_suffix}"] = spread([measured.overhead[one.number] for one in rounds])
    if measured.steps:
        out |= {f"{name}{dtype_suffix}": value for name, value in _step_figures(measured.steps).items()}
    return out


def _step_figures(steps: list[floor.StepTimes]) -> dict[str, Spread]:
    return {
        "step_over_floor": spread([one.step_over_floor for one in steps]),
        "prefill_share": spread([one.prefill_share for one in steps]),
        "decode_step_ms": spread([1e3 * seconds for seconds in floor.medians(steps, "decode")]),
        "floor_gemm_ms": spread([1e3 * seconds for seconds in floor.medians(steps, "gemm")]),
        "floor_attention_ms": spread([1e3 * seconds for seconds in floor.medians(steps, "attention")]),
    }


def _tokens_per_second(rounds: list[Round], name: str, workload: Workload) -> Spread:
    return spread([workload.output_tokens / one.seconds[name] for one in rounds])


def disturbed(all_measured: list[Measured], calibration: Calibration) -> tuple[int, int]:
    """Return the number of rounds that are not steady, and of all rounds."""
    rounds = [round_ for one in all_measured for round_ in (*one.generate, *one.tuned, *one.continuous)]
    return sum(not is_steady(round_, calibration) for round_ in rounds), len(rounds)


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=3, of="the 5 M float32 comparison")
    parser.add_argument("--plot", type=Path, help="write a picture (PNG) here")
    parser.add_argument("--quick", action="store_true", help="the 5 M model in float32 only, under a minute")
    args = parser.parse_args()
    workload, calibration = Workload(), Calibration()
    load_before = results_file.load_average()
    if not continuous_available():
        print("continuous batching is left out: on a CPU it needs the package psutil")
    all_measured = [measure(case, workload, calibration) for case in plan(args.rounds, args.quick)]
    metrics: dict[str, Spread] = {}
    for measured in all_measured:
        metrics |= figures(measured, workload, calibration)
    gone, total = disturbed(all_measured, calibration)
    table.show(metrics)
    print(f"{gone} of {total} rounds dropped (calibration GEMM off by more than 15%, or others at work)")
    if args.json:
        meta = results_file.describe(
            workload=vars(workload), models=models.SHAPES, rounds=total, rounds_disturbed=gone, load_before=load_before,
            calibration_ms=[round(1e3 * seconds, 3) for seconds in calibration.seconds],
            continuous={"like_samebit": vars(LIKE_SAMEBIT), "tuned": vars(TUNED)},
        )  # fmt: skip
        results_file.write(args.json, meta, metrics)
    if args.plot:
        table.plot(args.plot, metrics)


if __name__ == "__main__":
    main()
