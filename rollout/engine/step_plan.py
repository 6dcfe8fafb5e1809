"""Hold what passes between the engine and whatever computes a step.

A step is planned (`StepPlan`), launched (`Runner.launch`), and its outcome (`StepResult`) committed by the
engine. A runner reads sequences and never writes to them. Steps compute one after the other, in the order of their
launches, whenever their results are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from samebit.rollout.cache.checkpoints.pool import Captures, CheckpointMoves
from samebit.rollout.requests.request import Sequence, TopLogprobs

SCORED_BYTES = 128 << 20
"""The float32 logits of all prompt tokens that a step scores take at most this many bytes; but one is always scored,
and one of each sequence that is admitted."""


def most_scored(vocab_size: int) -> int:
    """Return how many prompt tokens a step scores at most, beside one of each sequence that it admits."""
    return max(1, SCORED_BYTES // (4 * vocab_size))


@dataclass(slots=True)
class ScheduledSequence:
    """Asks to compute positions `start .. start + length - 1` of a sequence.

    samples: of how many of its last rows the next token is drawn: 1 where the chunk ends at the sequence's last known
        token, else 0; with drafts, of every row.
    forks: samples that draw their first token from the same logits.
    captures: (position, checkpoint) of recurrent states to keep; positions after `start` and up to the chunk's end.
    drafts: guesses of the tokens behind the last known one, which are computed behind it. What is drawn behind a wrong
        one is void.
    """

    sequence: Sequence
    start: int
    length: int
    samples: int
    forks: tuple[Sequence, ...] = ()
    captures: Captures = ()
    drafts: tuple[int, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """Lists what a step computes: decodes first, then running prefills, then newly admitted sequences.

    copies: (from, to) blocks whose KV is copied before anything is computed, all at once.
    moves: what happens to recurrent states before anything is computed.
    num_drafts: the guesses among the tokens.
    num_scored: the prompt tokens among these that are scored: rows of logits beside those that are sampled from.
    has_images: whether a prompt with images is among the requests, of this step or of another; False for no other.
    sources: of a step that is launched behind another, before that one's tokens are known: each item computes one
        token, and this is the row of the other's draws that it is. None where all tokens are known.
    """

    items: list[ScheduledSequence] = field(default_factory=list)
    sources: list[int] | None = None
    num_tokens: int = 0
    num_drafts: int = 0
    num_scored: int = 0
    has_images: bool = False
    copies: list[tuple[int, int]] = field(default_factory=list)
    moves: CheckpointMoves = field(default_factory=CheckpointMoves)

    def add(self, sequence: Sequence, start: int, length: int, samples: int, forks: tuple[Sequence, ...] = ()) -> None:
        self.items.append(ScheduledSequence(sequence, start, length, samples, forks))
        self.num_tokens += length

    def draft(self, item: ScheduledSequence, drafts: tuple[int, ...]) -> None:
        """Compute these guesses behind an item that is a decode."""
        item.drafts = drafts
        item.length = item.samples = 1 + len(drafts)
        self.num_tokens += len(drafts)
        self.num_drafts += len(drafts)


@dataclass(slots=True)
class PromptLogprobs:
    """Holds log-probabilities of the prompt tokens at positions `start .. start + len(logprobs) - 1`.

    The token at position p is scored by the logits at p - 1, so `start` is at least 1, and a chunk that
    computes positions `a .. b` gives those of `a + 1 .. min(b + 1, num_prompt_tokens - 1)`.
    `top` has the most likely tokens at each of these positions, None when none were asked for.
    """

    sequence: Sequence
    start: int
    logprobs: npt.NDArray[np.float32]
    top: TopLogprobs | None = None


@dataclass(slots=True)
class StepResult:
    """Holds what a step found, an entry for each of R draws: those of the items, of each its rows before its forks.

    logprobs: [R] at the sampling temperature; raw_logprobs: [R] at temperature 1; the same where that, or
        0, is the sampling temperature.
    finite: [R], False where the logits held NaN or infinity; that token is void. A token of -1: there was none to draw,
        of finite logits; the request's parameters rule all out.
    top_logprobs: None when no sampled request asked for them, else one entry a row.
    prompt_logprobs: for each item whose sequence has `prompt_logprobs_wanted`.
    failed: sequences that could not be computed, each with its error; what was found of them is void.
    """

    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    raw_logprobs: npt.NDArray[np.float32]
    finite: npt.NDArray[np.bool_]
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)


@dataclass(slots=True)
class ImageCounters:
    """Counts images whose features a step needed: those that it computed, and those that it found."""

    computed: int = 0
    found: int = 0


class StepInFlight(Protocol):
    """Stands for a step that was launched."""

    def result(self) -> StepResult:
        """Return its outcome, as often as it is asked for; wait for the device."""


class Runner(Protocol):
    """Computes steps: the model, its KV pages and the sampler, and how long they took in all. `ModelRunner` is one.

    image_counters: of the images that it computed.
    """

    vocab_size: int
    forward_seconds: float
    sampler_seconds: float
    image_counters: ImageCounters

    def allocate_cache(self, num_blocks: int) -> None:
        """Allocate zeroed pages for blocks 0 .. num_blocks, block 0 being the null block."""

    def release_cache(self) -> None:
        """Give the pages back. Nothing is run until they are allocated again."""

    def forget_weights(self) -> None:
        """Keep nothing that was worked out of the weights: they change, or sleep."""

    def forget_sequences(self) -> None:
        """Keep nothing of the sequences of the step before: all have ended."""

    def wait_for_writes(self) -> None:
        """Return when all is done that any thread has launched where the weights are: on a GPU their writes, too."""

    def note_routes(self) -> None:
        """Note from the next step on, in the blocks, which experts compute each token."""

    def routes_of(self, blocks: list[int], count: int) -> npt.NDArray[np.int16]:
        """Return `[count, layers, experts of a token]`, what was noted of the first `count` tokens in these blocks."""

    def launch(
        self, plan: StepPlan, block_tables: npt.NDArray[np.int32], before: StepInFlight | None = None
    ) -> StepInFlight:
        """Start to compute the plan. Row `sequence.slot` of `block_tables` [slots, blocks] lists its blocks.

        `before`: the step whose draws a plan with `sources` goes on from.
        """
