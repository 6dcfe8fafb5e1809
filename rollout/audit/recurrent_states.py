"""Check the states of models with recurrent layers: where hits resume, and what was evicted."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from samebit.kernels.binding.binding import binding_of
from samebit.rollout.audit.prefix_cache import REQUESTS, CacheRuns, Run

PLENTY = 100
"""More states than all that is asked here leaves."""


class StatesCheck:
    """Checks where hits resume, on the model of `runs`."""

    def __init__(self, model: nn.Module, runs: CacheRuns) -> None:
        layout = binding_of(model).state_layout
        if layout is None:
            raise ValueError("this model has no recurrent layers, so there are no states to check")
        self._chunk = layout.chunk
        self._checkpoint_gb = layout.bytes_per_checkpoint(model.get_parameter("lm_head.weight").dtype) / 2**30
        self._runs = runs

    def runs(self) -> Iterator[Run]:
        yield self._offsets()
        yield self._evicted()

    def _offsets(self) -> Run:
        """Return prompts that leave a cached one on the grid of the blocks, on that of the states alone (where the
        model's length has room for blocks of two chunks), off both, and so soon behind a block that the convolution's
        window reaches back over its end. All of them resume at the end of the first block."""
        runs, chunk = self._runs, self._chunk
        both = 3 * chunk + 5 + runs.new_tokens <= runs.max_model_len
        block = max(2 * chunk if both else chunk, runs.block)
        ends = (block, block + chunk // 2 + 5, block + 1, block + 2, block + 3, *((block + chunk,) if both else ()))
        stem = runs.tokens(max(ends) + 3)
        prompts = [[*stem[:end], *runs.tokens(2)] for end in ends]
        params = runs.params(len(prompts))
        with runs.worker(block_size=block, state_cache_gb=PLENTY * self._checkpoint_gb) as worker:
            worker.generate([stem], runs.params(1))
            one_by_one = [worker.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
            outputs = [*one_by_one, *runs.hits(worker, prompts)]
        runs.need(all(out.num_cached_tokens == block for out in outputs), f"not every request skipped {block} tokens")
        name = "hits on and off the grids" if both else "hits on and off the grid"
        return name, outputs, 2 * runs.without(prompts)

    def _evicted(self) -> Run:
        """Return a run with room for one state, and for all blocks."""
        runs = self._runs
        prompts, params = [runs.tokens(runs.length) for _ in range(REQUESTS)], runs.params(REQUESTS)
        with runs.worker(state_cache_gb=self._checkpoint_gb) as worker:
            worker.generate(prompts, params)
            outputs = worker.generate(prompts, params)
            if worker.stats()["state_misses_evicted"] == 0:
                raise ValueError("no state was evicted: the model's length is too small to check it")
        return "evicted, their blocks kept", outputs, runs.without(prompts)
