"""What the prefix cache costs where nothing is shared: an engine with it and one without take turns, step by step.

Both compute the same prompts and sample the same tokens, so what slows the machine for longer than a step slows both.
Hashing the prompts counts. Each round has engines of its own, made in turns, so that no pair of pools decides.
"""

import gc
import time
from collections.abc import Callable

from alternate import Spread, spread
from stepped import add, engine_for
from transformers import PreTrainedModel
from workload import Tokens

from samebit.rollout.engine import Engine


def speed_with_over_without(model: PreTrainedModel, rounds: list[Tokens], new_tokens: int) -> Spread:
    """One value a round of prompts: seconds without the cache over seconds with it. The model is bound already."""
    _seconds(model, rounds[0][:2], new_tokens=2, first=True)  # compiles
    ratios: list[float] = []
    for number, prompts in enumerate(rounds):
        seconds = _seconds(model, prompts, new_tokens, first=number % 2 == 0)
        ratios.append(seconds[False] / seconds[True])
    return spread(ratios)


def _seconds(model: PreTrainedModel, prompts: Tokens, new_tokens: int, first: bool) -> dict[bool, float]:
    """Of the engines with (True) and without the cache; ``first`` begins."""
    order = (first, not first)
    longest = max(map(len, prompts)) + new_tokens
    engines = {cached: engine_for(model, len(prompts), longest, prefix_caching=cached) for cached in order}
    seconds = dict.fromkeys(order, 0.0)

    def turns(act: Callable[[Engine], object]) -> None:
        for cached in order:
            began = time.perf_counter()
            act(engines[cached])
            seconds[cached] += time.perf_counter() - began

    gc.collect()
    turns(lambda engine: add(engine, prompts, 1, new_tokens))
    while engines[first].has_work:
        turns(Engine.step)
    if engines[not first].has_work:
        raise RuntimeError("the engines took different steps")
    return seconds
