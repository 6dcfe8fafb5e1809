"""Read TRL's options of sampling as samebit understands them, and sample for a trainer.

Invariants
----------
* A sample ends where TRL says that it does: at one of the trainer's end tokens, whatever the model's own config says.
* A sample also ends where the model's length does, as under vLLM.
* A sample's random numbers follow from the state of torch's generator and the seed of the worker: transformers saves
  the first in checkpoints, so that a resumed training draws what the run would have drawn.
* The log-probability of a token is that of the unprocessed logits at the temperature: filters and penalties change the
  choice alone. The trainer's is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import torch

from samebit.rollout.requests.stopping import known_end_tokens
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.structured_outputs.params import StructuredOutputsParams
from samebit.rollout.worker import RolloutWorker

_SET_HERE = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "ignore_eos",
    "structured_outputs",
)  # fmt: skip
_OF_NO_USE = ("logprobs", "prompt_logprobs", "return_routed_experts", "adapter", "stop", "stop_token_ids")
"""Lists the fields of `SamplingParams` for which TRL has options of its own, and those for whose effect a trainer has
no place: `stop` would cut the text, which TRL decodes by itself."""

EXTRA = tuple(one.name for one in fields(SamplingParams) if one.name not in (*_SET_HERE, *_OF_NO_USE))
"""Lists what `generation_kwargs` may hold."""


REGEX = "vllm_structured_outputs_regex"
"""Names the option of TRL that constrains a completion; it is the one of vLLM's that says what is sampled."""


def sampling_params(args: Any, end_tokens: Sequence[int | None], vocab_size: int) -> SamplingParams:
    """Translate the arguments of a trainer.

    Args:
        args: TRL's `GRPOConfig`, `RLOOConfig` or `AsyncGRPOConfig`.
        end_tokens: the trainer's, those of the generation config and the tokenizer's. What the model can not sample is
            left out.
        vocab_size: of the model.

    Raises:
        ValueError: an option that samebit has no place for, or a value that it refuses, by name; no end token of the
            tokenizer.
    """
    named = [token for token in end_tokens if token is not None]
    if len(named) < len(end_tokens):
        raise ValueError("the tokenizer has no eos_token, by which TRL tells that a sample has ended")
    extra = dict(vars(args).get("generation_kwargs") or {})
    unknown = [name for name in extra if name not in EXTRA]
    if unknown:
        raise ValueError(f"generation_kwargs: samebit takes {', '.join(EXTRA)}, not {', '.join(map(str, unknown))}")
    regex = vars(args).get(REGEX)
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=0.0 if args.min_p is None else args.min_p,
        repetition_penalty=args.repetition_penalty,
        max_tokens=args.max_completion_length,
        ignore_eos=True,
        stop_token_ids=known_end_tokens(named, vocab_size, "the trainer's list of end tokens"),
        structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
        **extra,
    )


def fitting(params: SamplingParams, room: int) -> SamplingParams:
    """Return the same for a prompt behind which `room` tokens fit; as they are where none does, which is refused."""
    if room < 1:
        return params
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))


def sampled(
    worker: RolloutWorker, prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[list[list[int]], list[list[float]]]:
    """Sample once for each prompt; neighbours that are equal are samples of one request.

    Returns:
        the tokens of each prompt's sample, and their log-probabilities.

    Raises:
        RequestError: a prompt behind which no token fits.
    """
    groups = [(list(prompt), len(list(equal))) for prompt, equal in groupby(prompts)]
    length = worker.limits.max_model_len
    seeds = _seeds(worker, params, len(groups))
    each = [
        replace(fitting(params, length - len(prompt)), n=count, seed=seed)
        for (prompt, count), seed in zip(groups, seeds, strict=True)
    ]
    outputs = worker.generate([prompt for prompt, _ in groups], each)
    samples = [sample for output in outputs for sample in output.samples]
    return [sample.token_ids for sample in samples], [sample.logprobs for sample in samples]


def _seeds(worker: RolloutWorker, params: SamplingParams, count: int) -> list[int]:
    """Return a seed for each of so many groups, whose samples differ under one; that of the parameters, if they have
    one."""
    if params.seed is not None:
        return [params.seed] * count
    drawn: list[int] = torch.randint(torch.iinfo(torch.int64).max, (count,), device="cpu").tolist()
    return [seed ^ worker.config.seed for seed in drawn]
