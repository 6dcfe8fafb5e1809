"""Measure the cost of a scheduling step with 64 sequences running, and how it grows with the number that wait.

    python benchmarks/scheduler.py [--json FILE]

A step is `Engine.step()` - schedule, table bookkeeping, commit - on a runner that computes nothing. An
engine with few waiting requests and one with many take turns, step by step.
"""

import statistics
import time
from dataclasses import dataclass

import numpy as np

from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.rollout import SamplingParams
from samebit.rollout.cache import build_cache
from samebit.rollout.engine.engine import Engine
from samebit.rollout.engine.step_plan import ImageCounters, StepInFlight, StepPlan, StepResult
from samebit.rollout.requests.request import Request

RUNNING = 64
PROMPT = 256
BLOCK = 16
STEPS = 200
"""Count of steps of each engine in one repetition."""


class IdleRunner:
    """Answers at once: token 0 for every row."""

    vocab_size = 8
    forward_seconds = 0.0
    sampler_seconds = 0.0
    image_counters = ImageCounters()

    def __init__(self) -> None:
        self._results = {rows: _result(rows) for rows in range(RUNNING + 1)}

    def bytes_per_block(self) -> int:
        return 1

    def allocate_cache(self, num_blocks: int) -> None:
        pass

    def release_cache(self) -> None:
        pass

    def forget_weights(self) -> None:
        pass

    def forget_sequences(self) -> None:
        pass

    def wait_for_writes(self) -> None:
        pass

    def launch(self, plan: StepPlan, block_tables: np.ndarray, before: StepInFlight | None = None) -> StepInFlight:
        return IdleStep(self._results[sum(item.samples for item in plan.items)])


@dataclass(frozen=True)
class IdleStep:
    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


def _result(rows: int) -> StepResult:
    zeros = np.zeros(rows, np.float32)
    return StepResult(np.zeros(rows, np.int64), zeros, zeros, np.ones(rows, np.bool_))


def loaded_engine(waiting: int, new_tokens: int) -> Engine:
    """Return an engine with `RUNNING` sequences that decode for `new_tokens` steps, and `waiting` that find no room."""
    max_len = PROMPT + new_tokens
    cache = build_cache(
        num_blocks=RUNNING * -(-max_len // BLOCK), block_size=BLOCK, max_num_seqs=RUNNING, max_model_len=max_len
    )
    engine = Engine(IdleRunner(), cache, max_num_batched_tokens=RUNNING * PROMPT)
    params = SamplingParams(max_tokens=new_tokens)
    random = np.random.default_rng(0)
    for number in range(RUNNING + waiting):
        prompt = random.integers(0, IdleRunner.vocab_size, PROMPT)
        engine.add(Request(f"request-{number}", prompt, params, ordinal=number, max_new_tokens=new_tokens))
    engine.step()
    if len(engine.scheduler.running) != RUNNING or len(engine.scheduler.waiting) != waiting:
        raise RuntimeError(f"{len(engine.scheduler.running)} running, {len(engine.scheduler.waiting)} waiting")
    return engine


def measure(few: int, many: int, repetitions: int) -> dict[str, Spread]:
    """Return medians of each repetition: microseconds of a step with `few` and `many` waiting, and their ratio."""
    engines = {count: loaded_engine(count, (repetitions + 1) * STEPS + 2) for count in (few, many)}
    medians: dict[int, list[float]] = {few: [], many: []}
    for repetition in range(repetitions + 1):
        seconds: dict[int, list[float]] = {few: [], many: []}
        for _ in range(STEPS):
            for count, engine in engines.items():
                began = time.perf_counter()
                engine.step()
                seconds[count].append(time.perf_counter() - began)
        if repetition > 0:  # the first one warms up
            for count in engines:
                medians[count].append(statistics.median(seconds[count]))
    return {
        "schedule_growth": spread([b / a for a, b in zip(medians[few], medians[many], strict=True)]),
        **{f"schedule_us_{count}_waiting": spread([1e6 * s for s in medians[count]]) for count in engines},
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    args = parser.parse_args()
    metrics = measure(few=100, many=20_000, repetitions=5)
    table.show(metrics)
    if args.json:
        results_file.write(args.json, results_file.describe(running=RUNNING, steps=STEPS), metrics)


if __name__ == "__main__":
    main()
