"""Measure what the prefix cache costs when nothing is shared: engines with and without it take turns, step by step.

Each round has engines of its own, made in turns, so that no pair of pools decides.
"""

import gc

from transformers import PreTrainedModel

from samebit.benchmarks.rounds.stepped_engines import TimedRun, engine_for, take_turns
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.benchmarks.workloads.workload import Tokens


def speed_with_over_without(model: PreTrainedModel, rounds: list[Tokens], new_tokens: int) -> Spread:
    """Return the seconds without the cache over those with it, a value a round. The model is bound already."""
    _seconds(model, rounds[0][:2], new_tokens=2, first=True)  # compiles
    ratios: list[float] = []
    for number, prompts in enumerate(rounds):
        seconds = _seconds(model, prompts, new_tokens, first=number % 2 == 0)
        ratios.append(seconds[False] / seconds[True])
    return spread(ratios)


def _seconds(model: PreTrainedModel, prompts: Tokens, new_tokens: int, first: bool) -> dict[bool, float]:
    """Return the seconds of the engines with (True) and without the cache; ``first`` begins."""
    longest = max(map(len, prompts)) + new_tokens
    order = (first, not first)
    engines = {cached: engine_for(model, len(prompts), longest, prefix_caching=cached) for cached in order}
    gc.collect()
    runs = {cached: TimedRun(engine, prompts, new_tokens) for cached, engine in engines.items()}
    take_turns(list(runs.values()))
    return {cached: run.seconds for cached, run in runs.items()}
