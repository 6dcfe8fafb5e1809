"""Compute a step: token rows in, sampled tokens and their log-probabilities out.

Invariants
----------
* A token's random number depends on its seed (or on the engine's seed and the request's ordinal), its
  sample and its absolute position; never on the batch.
* What is reported comes from the unprocessed logits through `logprobs_from_logits`, the trainer's formula.
* Sequences are read, never written.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from samebit.kernels import logprobs_from_logits
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.binding.experts.routes import Routes, use_notes
from samebit.kernels.layout.lora.adapters import KeptTerms
from samebit.kernels.layout.memory_pool import WHOLE_GPU
from samebit.kernels.layout.states.memory import StateMemory
from samebit.kernels.layout.transfer import indices
from samebit.rollout.cache.checkpoints.pool import CheckpointMoves
from samebit.rollout.config import RolloutConfig
from samebit.rollout.engine.step_plan import PromptLogprobs, StepInFlight, StepPlan, StepResult
from samebit.rollout.memory.shape import Memory, MemoryShape
from samebit.rollout.runner.forward import forward_for
from samebit.rollout.runner.images.features import ImageFeatures
from samebit.rollout.runner.images.rows import Failed, image_rows
from samebit.rollout.runner.likely_tokens import most_likely
from samebit.rollout.runner.sampler import Draws, Sampler
from samebit.rollout.runner.step_inputs import Ints, PromptPiece, step_inputs


class ModelRunner:
    """Runs the bound model with its KV pages and its sampler. Implements `samebit.rollout.engine.step_plan.Runner`,
    which says what each method is asked."""

    def __init__(self, model: nn.Module, config: RolloutConfig) -> None:
        self.model = model
        self.vocab_size = binding_of(model).vocab_size
        self.shape = MemoryShape.of(model, config)
        self.sampler = Sampler(config.seed, config.exact, config.max_num_seqs)
        self.notes_routes = False
        self.kept_terms = KeptTerms()
        self.memory: Memory | None = None
        self.forward = forward_for(model.get_parameter("lm_head.weight"), config)
        self.images = ImageFeatures(model)
        self.image_counters = self.images.counters
        self.forward_seconds = 0.0
        self.sampler_seconds = 0.0

    def allocate_cache(self, num_blocks: int) -> None:
        routes = self.shape.allocate_routes(num_blocks) if self.notes_routes else None
        self.memory = self.shape.allocate(num_blocks, self.kept_terms, routes)

    def warm_up(self, block_tables: Ints) -> None:
        """Prepare for decodes, by steps that write to the null block alone; ``block_tables``: as of `launch`."""
        if self.memory is None:
            raise RuntimeError("the cache is not allocated: see allocate_cache()")
        self.forward.warm_up(self.model, self.memory, block_tables)

    def release_cache(self) -> None:
        self.forward.forget_memory()
        self.images.forget()
        self.memory = None

    def forget_weights(self) -> None:
        self.kept_terms.forget()
        self.images.forget()

    def forget_sequences(self) -> None:
        self.sampler.forget_sequences()
        self.images.forget()

    def wait_for_writes(self) -> None:
        if self.shape.device.type == "cuda":
            with WHOLE_GPU:
                torch.cuda.synchronize(self.shape.device)

    def note_routes(self) -> None:
        self.notes_routes = True
        if self.memory is not None:
            self.forward.forget_memory()
            self.memory = replace(self.memory, routes=self.shape.allocate_routes(self.memory.num_blocks))

    def routes_of(self, blocks: list[int], count: int) -> Routes:
        if not blocks and self.shape.routes is not None:  # there may be no memory: the cache sleeps
            return self.shape.routes.of_no_token()
        if self.memory is None or self.memory.routes is None:
            raise RuntimeError("no routes are noted: see note_routes()")
        return self.memory.routes.of_tokens(blocks, count)

    def launch(self, plan: StepPlan, block_tables: Ints, before: StepInFlight | None = None) -> StepInFlight:
        if self.memory is None:
            raise RuntimeError("the cache is not allocated: see allocate_cache()")
        drawn = None
        if plan.sources is not None:
            if not isinstance(before, ModelStep):
                raise TypeError(f"a plan with sources goes on from a step of this runner, got {before!r}")
            drawn = before.draws.tokens
        inputs = step_inputs(plan, block_tables, self.memory, self.sampler)
        began = time.perf_counter()
        failed: Failed = []
        if plan.has_images:
            images, failed = image_rows(plan.items, inputs.context.positions.numpy(), self.images)
            inputs = inputs if images is None else inputs.with_images(images)
        if plan.copies:
            self._copy_blocks(self.memory, plan.copies)
        if self.memory.states is not None:
            _move_states(self.memory.states, plan.moves)
        with use_notes(self.memory.routes):
            found = self.forward(self.model, inputs, drawn)
        forwarded = time.perf_counter()
        count = inputs.num_sampling_rows
        draws = self.sampler.sample(found.logits[:count], inputs.sequences, inputs.positions, found.draws)
        step = ModelStep(self, draws, _prompt_logprobs(found.logits[count:], inputs.pieces), failed)
        self.forward_seconds += forwarded - began
        self.sampler_seconds += time.perf_counter() - forwarded
        return step

    @torch.no_grad()
    def _copy_blocks(self, memory: Memory, copies: list[tuple[int, int]]) -> None:
        sources, targets = indices(np.array(copies, np.int64).T, self.shape.device)
        for pages in memory.pages:
            pages[targets] = pages[sources]
        if memory.routes is not None:
            memory.routes.copy_blocks(sources, targets)


@dataclass(frozen=True, eq=False)
class ModelStep:
    """Stands for a step that a `ModelRunner` has launched. See `samebit.rollout.engine.step_plan.StepInFlight`."""

    runner: ModelRunner
    draws: Draws
    prompt_logprobs: list[PromptLogprobs]
    failed: Failed

    def result(self) -> StepResult:
        """Return its outcome; wait for the device."""
        began = time.perf_counter()
        result = self.draws.result()
        result.prompt_logprobs = self.prompt_logprobs
        result.failed = self.failed
        self.runner.sampler_seconds += time.perf_counter() - began
        return result


@torch.no_grad()
def _move_states(states: StateMemory, moves: CheckpointMoves) -> None:
    states.take_checkpoints(moves.saves)
    states.copy_slots(moves.holds)
    states.restore_checkpoints(moves.restores)
    states.copy_slots(moves.forks)


def _prompt_logprobs(logits: torch.Tensor, pieces: list[PromptPiece]) -> list[PromptLogprobs]:
    """Score prompt tokens at temperature 1, and the most likely tokens where they are wanted."""
    results: list[PromptLogprobs] = []
    done = 0
    for piece in pieces:
        rows = logits[done : done + len(piece.rows)]
        done += len(piece.rows)
        ids = piece.sequence.token_ids[piece.start : piece.start + len(piece.rows)]
        tokens = torch.from_numpy(ids).to(rows.device)
        scores = logprobs_from_logits(rows, tokens)
        count = piece.sequence.params.prompt_logprobs
        ones = torch.ones(len(rows), dtype=torch.float32, device=rows.device)
        top = most_likely(rows, tokens, ones, count) if count else None
        results.append(PromptLogprobs(piece.sequence, piece.start, scores.cpu().numpy(), top))
    return results
