"""Measure what the prefix cache gains on requests that begin alike, beside the most that it could.

Three engines take turns: with the cache, without it, and one that computes only what the first one skips. The ideal is
the time of the second less that of the third.
"""

import gc
from dataclasses import dataclass

from transformers import PreTrainedModel

from samebit.benchmarks.rounds.stepped_engines import TimedRun, engine_for, take_turns
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.benchmarks.workloads.workload import Tokens


@dataclass(frozen=True)
class SharedRound:
    """Holds prompts that begin with the same ``shared`` tokens, and nothing but such beginnings, one for each that
    skips."""

    prompts: Tokens
    beginnings: Tokens


class SharedPrefix:
    """Runs the engines, on one model that is bound already. Each round begins with a cold cache."""

    def __init__(self, model: PreTrainedModel, sequences: int, longest: int) -> None:
        self._on, self._off, self._prefill = (
            engine_for(model, sequences, longest, prefix_caching=cached) for cached in (True, False, False)
        )

    def race(self, rounds: list[SharedRound], new_tokens: int) -> tuple[Spread, Spread]:
        """Return the speed-up over the ideal one and the cache's gain in requests per second, one value a round."""
        for engine in (self._on, self._off, self._prefill):  # compiles, and touches the pools' memory
            take_turns([TimedRun(engine, rounds[0].beginnings, 2)])
        over_ideal: list[float] = []
        gained: list[float] = []
        for one in rounds:
            on, off, prefill = self._seconds(one, new_tokens)
            over_ideal.append((off - prefill) / on)
            gained.append(off / on - 1)
        return spread(over_ideal), spread(gained)

    def _seconds(self, one: SharedRound, new_tokens: int) -> tuple[float, float, float]:
        self._on.clear_prefix_cache()
        gc.collect()
        skipped = sum(map(len, one.beginnings))
        runs = (
            TimedRun(self._on, one.prompts, new_tokens, skipped=skipped),
            TimedRun(self._off, one.prompts, new_tokens),
            TimedRun(self._prefill, one.beginnings, 1),
        )
        take_turns(runs)
        on, off, prefill = (run.seconds for run in runs)
        return on, off, prefill
