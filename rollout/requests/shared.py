"""Hold what the samples of a request share: what was asked for, and how far it is.

Invariant: nothing in here leads to a sequence. So a request and its samples are no circle: all of them, with their
tokens, scores and experts, are freed with the last reference to the request, and wait for no collection of garbage.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from samebit.kernels.layout.lora.adapters import Adapter
from samebit.rollout.requests.images import PromptImages
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.structured_outputs.grammars import Grammar

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RequestEvent:
    """Records that a request was added, scheduled, preempted or finished, or has its first token; `time` is
    `time.monotonic()`.

    `sample` is None for events of the whole request.
    """

    name: str
    time: float
    sample: int | None = None


@dataclass(slots=True, eq=False)
class Progress:
    """Says how far a request is: samples that have not ended, whether one was admitted, and whether one has a token."""

    unfinished: int
    started: bool = False
    answered: bool = False


class Shared:
    """Holds what was asked for in a request, and how far it is. Its sequences point to it, not to the request.

    `end_ids`: the tokens that end a sample.
    `error`: what failed it; None while nothing did.
    `adapter`: what it goes through until it ends; None for the model alone.
    `grammar`: what its samples are constrained to, compiled; None for nothing.
    `images`: of the prompt, until the request has ended; None without any.
    """

    __slots__ = (
        "adapter", "end_ids", "error", "events", "grammar", "images", "max_new_tokens", "ordinal", "params", "progress",
        "prompt", "request_id",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt: IntArray,
        params: SamplingParams,
        *,
        ordinal: int,
        max_new_tokens: int,
        eos_token_ids: tuple[int, ...],
        adapter: Adapter | None,
        grammar: Grammar | None,
        images: PromptImages | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.ordinal = ordinal
        self.max_new_tokens = max_new_tokens
        self.end_ids = frozenset((*(() if params.ignore_eos else eos_token_ids), *params.stop_ids))
        self.adapter = adapter
        self.grammar = grammar
        self.images = images
        self.events = [RequestEvent("added", time.monotonic())]
        self.progress = Progress(unfinished=params.n)
        self.error: Exception | None = None

    @property
    def finished(self) -> bool:
        """Return whether all samples have ended."""
        return self.progress.unfinished == 0

    def record(self, name: str, sample: int) -> float:
        """Record an event, and return its time."""
        now = time.monotonic()
        self.events.append(RequestEvent(name, now, sample))
        return now
