"""Give tests a runner that computes nothing but checks everything it is given, and factories over it.

Its pages hold the token ids themselves, so a step can see whether every earlier position of a sequence
is where the block table says; the next token is a hash of what it reads there. Beside each token stands the
oldest weight version that its KV depends on, so a step can see a hit on KV of other weights.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from samebit.rollout.adapters.registry import AdapterRegistry
from samebit.rollout.build import WorkerParts
from samebit.rollout.cache import Cache, build_cache
from samebit.rollout.cache.checkpoints.pool import CheckpointMoves, CheckpointPool
from samebit.rollout.config import RolloutConfig
from samebit.rollout.control.compute_threads import ComputeThreads
from samebit.rollout.control.weights.worker_weights import WorkerWeights
from samebit.rollout.drafts.drafter import Drafter
from samebit.rollout.engine.engine import Engine
from samebit.rollout.engine.step_plan import ImageCounters, PromptLogprobs, ScheduledSequence, StepPlan, StepResult
from samebit.rollout.requests.request import Request, Sequence
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker
from samebit.weight_sync.in_place.watch import WeightWatch

from .step_gate import StepGate

VOCAB = 101
EMPTY = -1


def fake_token(tokens: list[int], sample: int, salt: int = 0) -> int:
    """Return the token that follows `tokens` in a sample: what the fake model "samples"."""
    return zlib.crc32(np.array([*tokens, 1000 + sample, salt], np.int64).tobytes()) % VOCAB


def fake_continuation(prompt: list[int], sample: int, count: int, salt: int = 0) -> list[int]:
    """Compute a sample alone, with no engine: the oracle."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_token(tokens, sample, salt))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class State:
    """Stands for a recurrent state: the tokens that went in, the oldest weights among those it saw, and how many of the
    tokens were guessed."""

    tokens: list[int]
    oldest: int
    guessed: int = 0


class FakeStep:
    """Is a step that a `FakeRunner` has launched, which takes until its result is asked for."""

    def __init__(self, runner: FakeRunner, outcome: StepResult) -> None:
        self.runner = runner
        self.outcome = outcome
        self.waits = runner.gate is not None

    def result(self) -> StepResult:
        gate = self.runner.gate
        if gate is not None and self.waits:
            gate.pass_through()
        self.waits = False
        meanwhile, self.runner.meanwhile = self.runner.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        if self.runner.fail_with is not None:
            raise self.runner.fail_with
        return self.outcome


class FakeRunner:
    """Runs steps of the fake model. `gate`: when set, each step passes through it. `fail_with`: raised by the next
    step.

    `meanwhile`: called while the next step computes.
    `writing`: called once by who waits for writes that a GPU has not done yet.
    `nan_ids`: requests whose rows come out as not finite."""

    vocab_size = VOCAB

    def __init__(self, block_size: int, states: CheckpointPool | None = None) -> None:
        self.block_size = block_size
        self.states = states
        self.live: dict[int, State] = {}
        self.checkpoints: dict[int, State] = {}
        self.pages: npt.NDArray[np.int64] | None = None
        self.plans: list[list[tuple[str, int, int, int]]] = []
        self.gate: StepGate | None = None
        self.fail_with: Exception | None = None
        self.meanwhile: Callable[[], None] | None = None
        self.writing: Callable[[], None] | None = None
        self.nan_ids: set[str] = set()
        self.salt = 0
        self.current_version = lambda: 0
        self.budget = lambda: 0
        self.most_scored = lambda: 0
        self.entered = threading.Event()
        self.forward_seconds = 0.0
        self.sampler_seconds = 0.0
        self.image_counters = ImageCounters()

    def allocate_cache(self, num_blocks: int) -> None:
        assert self.pages is None, "allocated twice"
        self.pages = np.full((num_blocks + 1, self.block_size, 2), EMPTY, np.int64)
        self.live, self.checkpoints = {}, {}

    def release_cache(self) -> None:
        assert self.pages is not None, "released twice"
        self.pages = None

    def forget_weights(self) -> None:
        """Do nothing, as nothing is worked out of weights here."""

    def forget_sequences(self) -> None:
        """Do nothing, as nothing is kept of sequences here."""

    def wait_for_writes(self) -> None:
        writing, self.writing = self.writing, None
        if writing is not None:
            writing()

    def launch(self, plan: StepPlan, block_tables: npt.NDArray[np.int32], before: FakeStep | None = None) -> FakeStep:
        """Computes at once; a GPU would compute in the same order."""
        drawn = None if plan.sources is None else before.outcome.token_ids[plan.sources]
        self.entered.set()
        return FakeStep(self, self._run(plan, block_tables, drawn))

    def _run(
        self, plan: StepPlan, block_tables: npt.NDArray[np.int32], drawn: npt.NDArray[np.int64] | None
    ) -> StepResult:
        assert self.pages is not None, "a step while the KV cache is asleep"
        self.plans.append(
            [(i.sequence.shared.request_id, i.sequence.sample_index, i.start, i.length) for i in plan.items]
        )
        if plan.copies:
            sources, targets = np.array(plan.copies).T
            self.pages[targets] = self.pages[sources]
        self._move(plan.moves)
        assert plan.num_tokens == sum(item.length for item in plan.items) <= self.budget()
        assert all(item.length > 0 for item in plan.items)
        tokens: list[int] = []
        finite: list[bool] = []
        scores: list[PromptLogprobs] = []
        for row, item in enumerate(plan.items):
            sequence = item.sequence
            end = item.start + item.length
            known = [*sequence.token_ids[: end - len(item.drafts)].tolist(), *item.drafts]
            if drawn is not None:
                known[item.start :] = [int(drawn[row])]
            table = block_tables[sequence.slot]
            oldest = self.current_version() if sequence.kv.version is None else sequence.kv_spans[0][2]
            begin = max(item.start, sequence.kv.write_from)
            self._write(table, begin, known[begin:], oldest)
            assert self._read(table, end, 0) == known, "a position is not where its block is"
            assert set(self._read(table, end, 1)) == {oldest}, "KV that was computed under other weights"
            if self.states is not None:
                self._advance(item, known, oldest)
            ends = end == sequence.num_tokens + len(item.drafts) + (drawn is not None)
            assert item.samples == (1 + len(item.drafts) if ends else 0)
            assert item.samples == item.length or not item.drafts
            if sequence.prompt_logprobs_wanted:
                last = min(end, sequence.num_prompt_tokens - 1)
                values = -np.array(known + sequence.token_ids[end : end + 1].tolist(), np.float32)
                scores.append(PromptLogprobs(sequence, item.start + 1, values[item.start + 1 : last + 1]))
            assert not item.forks or item.samples
            for last in range(end - item.samples + 1, end + 1):
                for sample in (sequence, *item.forks):
                    assert sample.token_ids[: sample.num_tokens].tolist() == known[: sample.num_tokens]
                    tokens.append(fake_token(known[:last], sample.sample_index, self.salt))
                    finite.append(sequence.shared.request_id not in self.nan_ids)
        assert plan.num_scored == sum(len(score.logprobs) for score in scores) <= self.most_scored() + len(plan.items)
        ids = np.array(tokens, np.int64)
        return StepResult(
            ids,
            -ids.astype(np.float32) / 3,
            -ids.astype(np.float32) / 7,
            np.array(finite, bool),
            prompt_logprobs=scores,
        )

    def _move(self, moves: CheckpointMoves) -> None:
        for slot, checkpoint in moves.saves:
            state = self.live[slot]
            boundary = len(state.tokens) // self.block_size * self.block_size
            self.checkpoints[checkpoint] = State(state.tokens[:boundary], state.oldest)
        for source, slot in moves.holds:
            self.live[slot] = self.live[source]
        for checkpoint, slot in moves.restores:
            self.live[slot] = self.checkpoints[checkpoint]
        for source, slot in moves.forks:
            self.live[slot] = self.live[source]

    def _advance(self, item: ScheduledSequence, known: list[int], oldest: int) -> None:
        """Check that the live state has taken in what comes before the chunk, under the same weights, and nothing that
        can not be taken back: the end of a block; let it take in the chunk.
        """
        slot = item.sequence.slot
        if item.start:
            state = self.live[slot]
            before = State(state.tokens[: item.start], state.oldest)
            assert before == State(known[: item.start], oldest), "the state is not that of the tokens before"
            assert 0 <= len(state.tokens) - item.start <= state.guessed, "tokens that are certain were taken back"
            assert len(state.tokens) // self.block_size == item.start // self.block_size, "the state has moved"
        self.live[slot] = State(known, oldest, len(item.drafts))
        for position, checkpoint in item.captures:
            assert item.start < position <= len(known)
            self.checkpoints[checkpoint] = State(known[:position], oldest)

    def _write(self, table: npt.NDArray[np.int32], start: int, values: list[int], oldest: int) -> None:
        assert self.pages is not None
        for position, value in enumerate(values, start):
            block = table[position // self.block_size]
            assert block != 0, "a write to the null block"
            self.pages[block, position % self.block_size] = value, oldest

    def _read(self, table: npt.NDArray[np.int32], end: int, what: int) -> list[int]:
        assert self.pages is not None
        positions = np.arange(end)
        return self.pages[table[positions // self.block_size], positions % self.block_size, what].tolist()


def build_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 64,
    prefix_caching: bool = True,
    eviction_policy: str = "lru",
    recurrent: bool = False,
    num_checkpoints: int = 0,
    num_held: int = 0,
    run_ahead: bool = False,
    drafter: Drafter | None = None,
    watch: WeightWatch | None = None,
) -> Engine:
    """Build an engine over a fake runner. `recurrent`: the model has states too."""
    states = (
        CheckpointPool(num_checkpoints, block_size, range(max_num_seqs, max_num_seqs + num_held)) if recurrent else None
    )
    cache = build_cache(
        num_blocks,
        block_size,
        max_num_seqs,
        max_model_len,
        prefix_caching=prefix_caching,
        eviction_policy=eviction_policy,
        checkpoints=states,
    )
    engine = Engine(
        FakeRunner(block_size, states), cache, max_num_batched_tokens, run_ahead=run_ahead, drafter=drafter, watch=watch
    )
    engine.runner.current_version = lambda: engine.weight_version
    engine.runner.budget = lambda: engine.scheduler.max_num_batched_tokens
    engine.runner.most_scored = lambda: engine.scheduler.max_scored
    return engine


def build_request(
    request_id: str,
    prompt: list[int],
    *,
    ordinal: int = 0,
    eos: tuple[int, ...] = (),
    **params: object,
) -> Request:
    wanted = SamplingParams(**params)
    assert wanted.max_tokens is not None
    return Request(
        request_id,
        np.array(prompt, np.int64),
        wanted,
        ordinal=ordinal,
        max_new_tokens=wanted.max_tokens,
        eos_token_ids=eos,
    )


class TinyModule(nn.Module):
    """Has weights for the update tests: a tied pair, a buffer that persists and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.proj = nn.Linear(3, 5)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def tracked(cache: Cache, request: Request) -> Sequence:
    """Return the first sequence of a request, which the cache knows from now on."""
    cache.track(request)
    return request.sequences[0]


def weights_of(worker: RolloutWorker) -> dict[str, torch.Tensor]:
    """Return a copy of the weights that the worker generates with."""
    return {name: tensor.clone() for name, tensor in worker.module.state_dict().items()}


def worker_parts(engine: Engine, weights: WorkerWeights, **given: Any) -> WorkerParts:
    """Return what a worker is made of around an engine whose runner has no model."""
    parts = {
        "config": RolloutConfig(),
        "adapters": AdapterRegistry(weights.module),
        "max_model_len": 64,
        "eos_token_ids": (),
        "tokenizer": None,
        "has_experts": False,
        "dtype": torch.float32,
        "threads": ComputeThreads(),
    }
    return WorkerParts(engine=engine, weights=weights, **parts | given)


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    return build_engine


@pytest.fixture
def make_request() -> Callable[..., Request]:
    return build_request


@pytest.fixture
def oracle() -> Callable[..., list[int]]:
    return fake_continuation


@pytest.fixture
def make_worker() -> Iterator[Callable[..., tuple[RolloutWorker, FakeRunner]]]:
    """Give `make_worker(shared=..., **engine options)`; every worker is closed at the end of the test.

    `module`: in the place of a `TinyModule`. `beside`: a worker on a shared module, which the new one is to run on too.
    """
    built: list[tuple[RolloutWorker, FakeRunner]] = []

    def make(
        *,
        shared: bool = False,
        module: nn.Module | None = None,
        beside: RolloutWorker | None = None,
        eos: tuple[int, ...] = (),
        tokenizer: object = None,
        while_asleep: str = "raise",
        **engine: int,
    ) -> tuple[RolloutWorker, FakeRunner]:
        if module is None:
            module = TinyModule() if beside is None else beside.module
        users = None if beside is None else beside._weights.users
        core = build_engine(**engine, watch=WeightWatch(module if shared else None))
        runner = core.runner
        parts = worker_parts(
            core,
            WorkerWeights(module, shared=shared, users=users, watch=core.watch),
            config=RolloutConfig(while_asleep=while_asleep),
            max_model_len=engine.get("max_model_len", 64),
            eos_token_ids=eos,
            tokenizer=tokenizer,
        )
        worker = RolloutWorker.over(parts)
        built.append((worker, runner))
        return worker, runner

    yield make
    for worker, runner in built:
        if runner.gate is not None:
            gate, runner.gate = runner.gate, None
            gate.release(100)
        worker.close()
