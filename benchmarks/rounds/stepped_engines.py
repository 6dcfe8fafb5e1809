"""Step engines without threads by hand: one alone, or several in turns.

Turns go by the share of its tokens that each has computed, so all begin and end together and what slows the machine
for longer than a step slows all of them, also where one has many times the work of another.
"""

import time
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel

from samebit.rollout import RolloutConfig, SamplingParams
from samebit.rollout.cache import build_cache
from samebit.rollout.engine.engine import Engine
from samebit.rollout.requests.request import Request
from samebit.rollout.runner.model_runner import ModelRunner


def engine_for(model: PreTrainedModel, sequences: int, max_len: int, *, prefix_caching: bool = True) -> Engine:
    """Make an engine with slots and blocks for this many sequences of `max_len` tokens; the model is bound already."""
    config = RolloutConfig(max_num_seqs=sequences, enable_prefix_caching=prefix_caching).with_block_size(None)
    runner = ModelRunner(model, config)
    cache = build_cache(
        num_blocks=sequences * -(-max_len // runner.shape.block_size),
        block_size=runner.shape.block_size,
        max_num_seqs=sequences,
        max_model_len=max_len,
        prefix_caching=prefix_caching,
    )
    return Engine(runner, cache, config.max_num_batched_tokens)


def add(engine: Engine, prompts: Sequence[Sequence[int]], samples: int, new_tokens: int) -> None:
    """Queue some samples of each prompt; none of them stops early."""
    params = SamplingParams(n=samples, temperature=1.0, max_tokens=new_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        ids = np.array(prompt, np.int64)
        engine.add(Request(f"prompt-{number}", ids, params, ordinal=number, max_new_tokens=new_tokens))


class TimedRun:
    """Runs one sample of each of these prompts on an engine, timed: queueing them, which hashes them, and its steps."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, *, skipped: int = 0) -> None:
        """Queue the prompts; ``skipped`` is the number of prompt tokens that the prefix cache will spare."""
        self._engine = engine
        self._before = _computed(engine)
        self._tokens = sum(map(len, prompts)) - skipped + len(prompts) * (new_tokens - 1)
        began = time.perf_counter()
        add(engine, prompts, 1, new_tokens)
        self.seconds = time.perf_counter() - began

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def share_computed(self) -> float:
        return (_computed(self._engine) - self._before) / self._tokens

    def step(self) -> None:
        began = time.perf_counter()
        self._engine.step()
        self.seconds += time.perf_counter() - began

    def check_done(self) -> None:
        """Raise unless exactly the tokens foreseen were computed."""
        if self.share_computed != 1:
            raise RuntimeError(f"computed {self.share_computed:.3f} of the {self._tokens} tokens foreseen")


def take_turns(runs: Sequence[TimedRun]) -> None:
    """Let the engine with the smallest computed share of its tokens make the next step, until all have ended."""
    while waiting := [run for run in runs if run.has_work]:
        min(waiting, key=lambda run: run.share_computed).step()
    for run in runs:
        run.check_done()


def _computed(engine: Engine) -> int:
    return engine.counters.prefill_tokens_computed + engine.counters.decode_tokens_computed
