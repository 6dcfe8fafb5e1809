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

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from samebit.rollout.requests.prompt_with_images import GivenPrompt, PromptWithImages
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

_OF_IMAGES = ("pixel_values", "image_grid_thw")
_OF_OTHER_MEDIA = ("pixel_values_videos", "video_grid_thw", "input_features")
"""List what a processor makes of images, and what of others."""

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


def as_tensors(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a processor has made, that of images as tensors: without ``return_tensors`` some give arrays, which
    TRL can not split by prompts."""
    return {
        name: torch.as_tensor(np.asarray(one)) if name in _OF_IMAGES and not isinstance(one, torch.Tensor) else one
        for name, one in fields.items()
    }


def with_images(
    prompt_ids: Sequence[list[int]], images: Sequence[Sequence[object] | None] | None, fields: Mapping[str, Any]
) -> list[GivenPrompt]:
    """Return prompts as a worker takes them, each with its images.

    Args:
        prompt_ids: of each prompt.
        images: of each prompt, of which only the count is read; None where no prompt has any.
        fields: what the processor has made of all of them, in their order (`as_tensors`): TRL's `multimodal_fields`.

    Raises:
        ValueError: videos or audio; images of which no `pixel_values` and `image_grid_thw` were made.
    """
    others = [name for name in _OF_OTHER_MEDIA if fields.get(name) is not None]
    if others:
        raise ValueError(f"samebit under TRL does not go with {' and '.join(others)}: prompts hold text and images")
    counts = [len(own or ()) for own in images or ()]
    if not any(counts):
        return list(prompt_ids)
    missing = [name for name in _OF_IMAGES if fields.get(name) is None]
    if missing:
        raise ValueError(
            f"the prompts have {sum(counts)} images, of which the processing_class has made no "
            f"{' and no '.join(missing)}: pass the model's processor, AutoProcessor.from_pretrained(...)"
        )
    pixels, grids = (fields[name] for name in _OF_IMAGES)
    grids_of = grids.split(counts)
    pixels_of = pixels.split([int(own.prod(-1).sum()) for own in grids_of])
    return [
        PromptWithImages(ids, patches, own) if count else ids
        for ids, patches, own, count in zip(prompt_ids, pixels_of, grids_of, counts, strict=True)
    ]


def token_ids_of(prompt: GivenPrompt) -> list[int]:
    """Return the token ids of a prompt, placeholders of images among them."""
    return prompt.token_ids if isinstance(prompt, PromptWithImages) else prompt


def sampled(
    worker: RolloutWorker, prompts: Sequence[GivenPrompt], params: SamplingParams
) -> tuple[list[list[int]], list[list[float]]]:
    """Sample once for each prompt; neighbours that are equal are samples of one request.

    Returns:
        the tokens of each prompt's sample, and their log-probabilities.

    Raises:
        RequestError: a prompt behind which no token fits, or images that are not those of its placeholders.
    """
    groups = _groups(prompts)
    length = worker.limits.max_model_len
    seeds = _seeds(worker, params, len(groups))
    each = [
        replace(fitting(params, length - len(token_ids_of(prompt))), n=count, seed=seed)
        for (prompt, count), seed in zip(groups, seeds, strict=True)
    ]
    outputs = worker.generate([prompt for prompt, _ in groups], each)
    samples = [sample for output in outputs for sample in output.samples]
    return [sample.token_ids for sample in samples], [sample.logprobs for sample in samples]


def _groups(prompts: Sequence[GivenPrompt]) -> list[tuple[GivenPrompt, int]]:
    """Return each run of equal neighbours as one, and their count."""
    found: list[tuple[GivenPrompt, int]] = []
    for prompt in prompts:
        prompt, count = found.pop() if found and _are_equal(found[-1][0], prompt) else (prompt, 0)
        found.append((prompt, count + 1))
    return found


def _are_equal(one: GivenPrompt, other: GivenPrompt) -> bool:
    if isinstance(one, PromptWithImages) and isinstance(other, PromptWithImages):
        grids, pixels = (one.image_grid_thw, other.image_grid_thw), (one.pixel_values, other.pixel_values)
        return one.token_ids == other.token_ids and torch.equal(*grids) and torch.equal(*pixels)
    return one == other


def _seeds(worker: RolloutWorker, params: SamplingParams, count: int) -> list[int]:
    """Return a seed for each of so many groups, whose samples differ under one; that of the parameters, if they have
    one."""
    if params.seed is not None:
        return [params.seed] * count
    drawn: list[int] = torch.randint(torch.iinfo(torch.int64).max, (count,), device="cpu").tolist()
    return [seed ^ worker.config.seed for seed in drawn]
