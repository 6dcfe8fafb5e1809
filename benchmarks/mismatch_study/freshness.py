"""Notice an engine whose weights are not the trainer's: before the first step by bits, at each step by differences.

Before the first step of a run, an engine that was built of other weights loads the policy's, and then a new one is
built of them: both must draw the same tokens with the same bits. Each step is held against the first that the program
makes, whose engine was just built: where the mean difference to the trainer is more than twice as large, or in the
first step more than .1, the run is void. Either ends with `StaleEngineError`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from samebit.benchmarks.engines.policy_messages import Draw, building, drawing, loading

MOST = 2.0
"""Mean difference of a step, at most, over that of a just built engine."""
FARTHEST = 0.1
"""Mean difference of a just built engine, at most: it was .002 for the built-in models in bfloat16."""
_PROBE = Draw([[1, 4 + i, 5] for i in range(8)], samples=4, max_tokens=32, temperature=1.0, ends=[], seed=0)


class Asked(Protocol):
    """Answers messages, as an `EngineProcess` does."""

    def ask(self, message: dict[str, Any]) -> dict[str, Any]: ...


class StaleEngineError(RuntimeError):
    """An engine sampled with other weights than the trainer's: the run is void."""


class Freshness:
    """Checks each step by the first one that it sees, which a just built engine has to have sampled."""

    def __init__(self) -> None:
        self._of_new_engine: float | None = None

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise StaleEngineError where the mean difference is more than twice a new engine's, or NaN."""
        found = metrics["training/rollout_logprobs_diff_mean"]
        if self._of_new_engine is None:
            self._of_new_engine = found
            if not found <= FARTHEST:
                raise StaleEngineError(
                    f"step {step}: the mean |rollout logprob - trainer logprob| of a just built engine is {found:.3g}: "
                    f"it does not compute this policy"
                )
        if not found <= MOST * self._of_new_engine:
            raise StaleEngineError(
                f"step {step}: the mean |rollout logprob - trainer logprob| is {found:.3g}, that of a just built "
                f"engine was {self._of_new_engine:.3g}: the run is void from here on"
            )


def prove_reload(engine: Asked, folder: Path) -> None:
    """Let an engine, built of other weights, load this folder, and be built anew of it: both must draw the same bits.

    Raises:
        StaleEngineError: they differ, or the engine drew these bits before it had the folder.
    """
    before = engine.ask(drawing(_PROBE))
    engine.ask(loading(str(folder)))
    loaded = engine.ask(drawing(_PROBE))
    engine.ask(building(str(folder)))
    built = engine.ask(drawing(_PROBE))
    if loaded != built:
        raise StaleEngineError("an engine that loaded new weights draws other bits than one that was built of them")
    if before == built:
        raise StaleEngineError("other weights gave the same bits, so that reloading them is not proven")
