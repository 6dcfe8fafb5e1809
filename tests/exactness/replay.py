"""Note what a worker computed under which weights, and compute the same again, alone: the oracle of mixtures.

A token that was sampled under "keep" may attend to keys of several weights. No training forward gives its
log-probability, but an engine with one request does, which computes the same positions under the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from samebit.rollout import RolloutConfig
from samebit.rollout.cache import build_cache
from samebit.rollout.engine.engine import Engine
from samebit.rollout.requests.request import Request
from samebit.rollout.runner.model_runner import ModelRunner
from samebit.rollout.sampling_params import SamplingParams

Span = tuple[int, int, int]


@dataclass(frozen=True)
class Origin:
    """Says where a sampled token comes from: the weights that each position of its context was computed under, the last
    ones its own. shared: up to where the KV was there before the first of them was computed, of its weights.
    """

    context: tuple[Span, ...]
    shared: int

    @property
    def version(self) -> int:
        return self.context[-1][2]

    @property
    def oldest(self) -> int:
        return self.context[0][2]


def extended(spans: tuple[Span, ...], end: int, version: int) -> tuple[Span, ...]:
    """Return `spans` with what follows, up to `end`, under `version`."""
    if spans and spans[-1][1] >= end:
        return spans
    if spans and spans[-1][2] == version:
        return (*spans[:-1], (spans[-1][0], end, version))
    return (*spans, (spans[-1][1] if spans else 0, end, version))


class Journal:
    """Notes what a worker computes, from before its first request on; keyed by (request id, sample)."""

    def __init__(self, worker: Any) -> None:
        self.context: dict[tuple[str, int], tuple[Span, ...]] = {}
        self.kv: dict[tuple[str, int], tuple[Span, ...]] = {}
        self.shared: dict[tuple[str, int], int] = {}
        self.origins: dict[tuple[str, int], list[Origin]] = {}
        self.recomputed: set[tuple[str, int]] = set()
        self._guessed: list[tuple[Any, int, int]] = []
        self._engine = worker._engine
        self._launch = worker._engine.runner.launch
        self._engine.runner.launch = self._logged_launch

    def settle(self) -> None:
        """Note what was guessed right in the last step: each such token was computed, and drawn from is what follows
        it."""
        for item, known, version in self._guessed:
            key = _key(item.sequence)
            for end in range(known + 1, item.sequence.num_tokens):
                self._note(key, end, version)
                self.origins[key].append(Origin(self.context[key], self.shared[key]))
        self._guessed = []

    def _note(self, key: tuple[str, int], end: int, version: int) -> None:
        """Note that a sample is computed up to `end`."""
        self.context[key] = extended(self.context[key], end, version)
        self.kv[key] = extended(self.kv[key], max(end, self.shared[key]), version)

    def _logged_launch(self, plan: Any, tables: Any, before: Any) -> Any:
        self.settle()
        step = self._launch(plan, tables, before)
        version = self._engine.weight_version
        for item in plan.items:
            key = _key(item.sequence)
            anew = plan.sources is None and item.sequence.kv.version is None
            if anew and key in self.context:
                self.recomputed.add(key)
            if anew:
                self.context[key] = self.kv[key] = ()
                self.shared[key] = item.sequence.kv.write_from
            self._note(key, item.start + item.length - len(item.drafts), version)
            if item.drafts:
                self._guessed.append((item, item.sequence.num_tokens, version))
            for sample in (item.sequence, *item.forks) if item.samples else ():
                self.origins.setdefault(_key(sample), []).append(Origin(self.context[key], self.shared[key]))
        return step


def _key(sequence: Any) -> tuple[str, int]:
    return sequence.shared.request_id, sequence.sample_index


class Replay:
    """Computes contexts again: `models[v]` has the weights that `v` stands for in a context."""

    def __init__(self, models: dict[int, nn.Module], max_model_len: int, block_size: int) -> None:
        self._models = models
        config = RolloutConfig(block_size=block_size, max_num_seqs=1, enable_prefix_caching=False)
        self._runner = ModelRunner(next(iter(models.values())), config)
        blocks = -(-max_model_len // block_size)
        cache = build_cache(
            blocks, block_size, 1, max_model_len, prefix_caching=False, checkpoints=self._runner.shape.checkpoint_pool()
        )
        self._engine = Engine(self._runner, cache, max_model_len)

    def scores(self, ids: list[int], context: tuple[Span, ...], shared: int) -> torch.Tensor:
        """Return the log-probability of each token of `ids[1:]`, at temperature 1, given this context."""
        request = Request(
            "replay",
            np.array(ids, np.int64),
            SamplingParams(prompt_logprobs=0, max_tokens=1),
            ordinal=0,
            max_new_tokens=1,
        )
        self._engine.add(request)
        (sequence,) = request.sequences
        if shared > context[0][1]:
            self._compute(0, shared, context[0][2])
            sequence.num_computed, sequence.kv.write_from = 0, shared
        for start, end, version in context:
            self._compute(start, end, version)
        assert sequence.num_computed == context[-1][1]
        found = torch.from_numpy(sequence.prompt_scores.logprobs[1 : len(ids)].copy())
        self._engine.abort(["replay"])
        return found

    def _compute(self, start: int, end: int, version: int) -> None:
        self._runner.model = self._models[version]
        self._engine.scheduler.max_num_batched_tokens = end - start
        self._engine.step()
