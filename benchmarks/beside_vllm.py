"""Measure samebit beside vLLM and Hugging Face, each in a process of its own, in turns.

    make bench-vllm ARGS="[--parts NAME ...] [--json FILE] [--rounds N] [--quick]"

A part is a model, a dtype and a workload, as 5m_fp32_groups. Each is written when it is done; a file that holds a part
already spares it, so that a run that was cut off goes on. README.md in this folder defines each number.
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samebit.benchmarks.engines import commands
from samebit.benchmarks.engines.process import Command, EngineProcess, started
from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.parts_file import PartsFile
from samebit.benchmarks.rounds.turns import (
    REST,
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
from samebit.benchmarks.workloads import models, served

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
WITH_HUGGING_FACE = ("groups",)
"""Workloads that `generate` takes part in: it has no prefix cache, so the others say nothing of it."""
WARM_UP = 10**6
"""Is the number of the first round that is not measured."""
WHOLE = 2
"""Rounds of the whole work that are not measured."""


@dataclass(frozen=True)
class Part:
    """Names a model, a dtype and a workload."""

    shape: str
    dtype: str
    work: str

    def __str__(self) -> str:
        return f"{self.shape}_{self.dtype}_{self.work}"


PARTS = {
    str(part): part
    for part in (Part(shape, dtype, work) for shape in models.SHAPES for dtype in DTYPES for work in served.WORK)
}


@dataclass(frozen=True)
class Run:
    """Holds how all parts are measured: the sizes of a workload for a vocabulary, vLLM, rounds."""

    sizes: Callable[[int], served.Sizes]
    vllm: Callable[[commands.Model], Command]
    rounds: int
    calibration: Calibration


@contextmanager
def model_folder(shape: dict[str, Any], dtype: str, max_len: int) -> Iterator[commands.Model]:
    """Write a model's folder, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(shape, models.DTYPES[dtype], max_len)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)
        yield commands.Model(Path(folder), DTYPES[dtype], max_len)


def measure(part: Part, run: Run) -> tuple[list[Round], served.Sizes]:
    """Start the engines, warm them up, and let them take turns."""
    shape = models.SHAPES[part.shape]
    sizes = run.sizes(shape["vocab_size"])
    work = served.WORK[part.work](sizes)
    with ExitStack() as stack:
        model = stack.enter_context(model_folder(shape, part.dtype, sizes.longest))
        ours = stack.enter_context(started(commands.samebit(model)))
        vllm = stack.enter_context(started(run.vllm(model)))
        engines = {"samebit": (ours, True), "vllm": (vllm, False), "vllm_logprobs": (vllm, True)}
        if part.work in WITH_HUGGING_FACE:
            engines["hf_generate"] = (stack.enter_context(started(commands.hugging_face(model))), False)
        processes = {id(engine): engine for engine, _ in engines.values()}.values()
        for engine in processes:
            _warm_up(engine, part, sizes)

        def turn(engine: EngineProcess, logprobs: bool) -> Turn:
            return lambda number: work(engine, number, logprobs)

        rounds = alternate(
            {name: turn(*one) for name, one in engines.items()},
            run.rounds,
            run.calibration,
            lambda: time.process_time() + sum(engine.cpu_seconds() for engine in processes),
            REST,
        )
    return rounds, sizes


def _warm_up(engine: EngineProcess, part: Part, sizes: served.Sizes) -> None:
    """Let it compile, with log-probabilities and without, and touch its memory, which takes the whole work: the first
    write to a page took 14 us, up to a quarter of samebit's first round."""
    short = served.WORK[part.work](replace(sizes, new_tokens=8, turn_output=8))
    for logprobs in (True, False):
        short(engine, WARM_UP, logprobs)
    for whole in range(WHOLE):
        served.WORK[part.work](sizes)(engine, WARM_UP + 1 + whole, False)


def figures(part: Part, rounds: list[Round], sizes: served.Sizes, calibration: Calibration) -> dict[str, Spread]:
    """Return the figures of one part, of its steady rounds."""
    steady = kept(rounds, calibration)
    peers = [name for name in rounds[0].seconds if name != "samebit"]
    found = {f"ratio_vs_{name}_{part}": ratio(steady, name, "samebit") for name in peers}
    for name in rounds[0].seconds:
        speeds = [sizes.output_tokens(part.work) / one.seconds[name] for one in steady]
        found[f"tokens_per_second_{name}_{part}"] = spread(speeds)
    return found


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=4, of="each part", parts=PARTS)
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens")
    parser.add_argument("--vllm", type=Path, default=commands.VLLM_PYTHON, help="the Python that has vLLM")
    parser.add_argument("--vllm-threads", choices=commands.VLLM_THREADS, default=commands.VLLM_THREADS[0])
    args = parser.parse_args()
    vllm = commands.Vllm(args.vllm, args.vllm_threads)
    vllm.check()
    kept_parts = PartsFile(args.json)
    run = Run(_quick if args.quick else served.Sizes, lambda model: vllm.command(model, kv_gb=3), args.rounds,
              Calibration())  # fmt: skip
    for name in kept_parts.missing(args.parts or list(PARTS)):
        began = time.perf_counter()
        rounds, sizes = measure(PARTS[name], run)
        metrics = figures(PARTS[name], rounds, sizes, run.calibration)
        steady = sum(is_steady(one, run.calibration) for one in rounds)
        about = results_file.describe(
            workload=vars(sizes), vllm_threads=args.vllm_threads,
            vllm_preloads=[Path(one).name for one in vllm.preloads()], rounds=len(rounds), rounds_steady=steady,
            seconds=[one.seconds for one in rounds],
        )  # fmt: skip
        kept_parts.add(name, about, metrics)
        table.show(metrics)
        print(f"{name}: {steady} of {len(rounds)} rounds steady, {time.perf_counter() - began:.0f} s")


def _quick(vocab_size: int) -> served.Sizes:
    return served.Sizes(vocab_size, samples=2, new_tokens=32, requests=16, conversations=4, turn_output=25)


if __name__ == "__main__":
    main()
