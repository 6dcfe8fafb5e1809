"""Decide in the caller's thread whether a request can be served, before anything is submitted.

Invariant: a request that passes can finish: its ids are in the vocabulary, its length is within the
model's, and the pool can hold it alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.images.image_layout import ImageLayout
from samebit.rollout.checks import shown
from samebit.rollout.errors import RequestError
from samebit.rollout.requests.images import PromptImages, checked_images
from samebit.rollout.requests.prompt_with_images import PromptWithImages, refuse_images
from samebit.rollout.requests.shared import IntArray
from samebit.rollout.sampling_params import SamplingParams


@dataclass(frozen=True)
class RequestLimits:
    """Holds what this worker's model and memory allow.

    images: what the model takes images as; None where it computes text alone, and why. device: where it computes.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    has_tokenizer: bool
    has_experts: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    images: ImageLayout | None = None
    why_no_images: str = ""

    def check_given(self, prompt: object) -> tuple[IntArray, PromptImages | None]:
        """Return the ids of a prompt and its images, None without any, or raise `RequestError`."""
        if not isinstance(prompt, PromptWithImages):
            return self.check_prompt(prompt), None
        if self.images is None:
            raise RequestError(
                f"the prompt has images, and this worker's model computes text alone{self.why_no_images}; allowed: a "
                "module with vision that is bound for images (docs/images.md), or RolloutConfig(images=True) where it "
                "is a folder's or a name's"
            )
        if self.device != "cpu":
            raise RequestError(f"the prompt has images, and the model is on {self.device!r}; allowed: on the CPU")
        ids = self.check_prompt(prompt.token_ids)
        return ids, checked_images(prompt, ids, self.images)

    def check_prompt(self, prompt: object) -> IntArray:
        """Return the prompt as an array of ids, or raise `RequestError`."""
        ids = _as_integers(prompt)
        if len(ids) == 0:
            raise RequestError("the prompt is empty; at least one token is needed")
        low, high = int(ids.min()), int(ids.max())  # as given: an unsigned one wraps in int64
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(f"prompt token id {bad} is outside the vocabulary (0 to {self.vocab_size - 1})")
        if len(ids) > self.max_model_len - 1:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; at most {self.max_model_len - 1} are allowed "
                f"(max_model_len={self.max_model_len}, one token for the output)"
            )
        return ids.astype(np.int64, copy=False)

    def check_params(self, params: object, prompt_length: int) -> int:
        """Return the most tokens this request may sample, or raise `RequestError`."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}")
        room = self.max_model_len - prompt_length
        max_new = room if params.max_tokens is None else params.max_tokens
        if max_new > room:
            raise RequestError(
                f"prompt ({prompt_length}) + max_tokens ({max_new}) is more than max_model_len="
                f"{self.max_model_len}; max_tokens may be at most {room}, or None for as many as fit"
            )
        if params.min_tokens > max_new:
            raise RequestError(f"min_tokens={params.min_tokens}, but at most {max_new} tokens fit")
        self._check_memory(prompt_length, max_new)
        self._check_ids("stop_token_ids", params.stop_ids)
        self._check_ids("logit_bias", params.logit_bias or ())
        for field, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > self.vocab_size:
                raise RequestError(f"{field}={count} is more than the vocabulary ({self.vocab_size})")
        if params.stop_strings and not self.has_tokenizer:
            raise RequestError("stop strings need a tokenizer, and this worker has none")
        if params.return_routed_experts and not self.has_experts:
            raise RequestError("return_routed_experts=True needs a model with routed experts, bound with exact=True")
        return max_new

    def _check_memory(self, prompt_length: int, max_new: int) -> None:
        positions = prompt_length + max_new - 1
        needed = ceil_div(positions, self.block_size)
        if needed > self.num_blocks:
            allowed = self.num_blocks * self.block_size + 1 - prompt_length
            hint = f"max_tokens may be at most {allowed}" if allowed > 0 else "shorten the prompt"
            raise RequestError(
                f"the request can never fit: it needs {needed} KV blocks of {self.block_size} tokens, the "
                f"pool has {self.num_blocks}; {hint}"
            )

    def _check_ids(self, field: str, ids: Iterable[int]) -> None:
        bad = [token for token in ids if token >= self.vocab_size]
        if bad:
            raise RequestError(f"{field} has {bad}, outside the vocabulary (0 to {self.vocab_size - 1})")


def _as_integers(prompt: object) -> npt.NDArray[np.integer[Any]]:
    """Return a prompt as an array of its own; of unsigned integers where it is one of these."""
    refuse_images([prompt])
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise RequestError(
                f"a prompt array must be one-dimensional and of integers, got {prompt.ndim} dimensions of "
                f"{prompt.dtype}"
            )
        ids: npt.NDArray[np.integer[Any]] = prompt.copy()
        return ids
    if not isinstance(prompt, list | tuple):
        raise RequestError(f"a prompt must be a list of token ids, got {type(prompt).__name__}")
    if set(map(type, prompt)) - {int}:
        for index, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise RequestError(f"prompt[{index}] is {token!r}, not a token id")
    try:
        return np.fromiter(prompt, np.int64, len(prompt))
    except OverflowError as error:
        index, token = next((at, one) for at, one in enumerate(map(int, prompt)) if not -(2**63) <= one < 2**63)
        raise RequestError(f"prompt[{index}] is {shown(token)}, which does not fit in 64 bits") from error
