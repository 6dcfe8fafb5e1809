"""Translate a request out of verl's words, and its result into them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
from omegaconf import OmegaConf

from samebit.rollout.checks import shown
from samebit.rollout.errors import RequestError
from samebit.rollout.integrations.verl.names import ADAPTER
from samebit.rollout.integrations.verl.options import ServerOptions
from samebit.rollout.integrations.verl.server.steps import StepsOfVersions
from samebit.rollout.outputs import RequestOutput, SampleOutput
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.structured_outputs.params import StructuredOutputsParams

_HONOURED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop", "stop_token_ids",
    "ignore_eos", "seed", "logit_bias", "structured_outputs",
)  # fmt: skip
_LENGTHS = ("max_tokens", "max_new_tokens")


def sampling_params(
    asked: Mapping[str, Any],
    num_prompt_tokens: int,
    options: ServerOptions,
    *,
    room: int,
    eos: tuple[int, ...],
    seed: int | None = None,
) -> SamplingParams:
    """Translate what an agent loop asks for.

    room: tokens that fit behind the prompt. eos: ids that end a response beside those of the model. seed: for a request
    that brings none; None for the worker's own.

    Raises:
        RequestError: a parameter that samebit does not know, or a prompt without room for a token.
        ValueError: a value that `SamplingParams` or `StructuredOutputsParams` refuses.
    """
    known = (*_HONOURED, *_LENGTHS, "logprobs")
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise RequestError(f"unknown sampling parameters: {', '.join(unknown)}; samebit knows {', '.join(known)}")
    if room < 1:
        raise RequestError(f"the prompt has {num_prompt_tokens} tokens: there is no room for a token behind it")
    chosen = {name: asked[name] for name in _HONOURED if name in asked}
    chosen.setdefault("repetition_penalty", options.repetition_penalty)
    if not chosen.setdefault("ignore_eos", options.ignore_eos):
        chosen["stop_token_ids"] = [*(chosen.get("stop_token_ids") or ()), *eos]
    if chosen.get("seed") is None:
        chosen["seed"] = seed
    chosen["structured_outputs"] = _constraint(chosen.get("structured_outputs"))
    length = next((asked[name] for name in _LENGTHS if asked.get(name) is not None), None)
    if length is None:
        length = min(options.response_length, options.prompt_length + options.response_length - num_prompt_tokens)
    chosen["return_routed_experts"] = options.routed_experts
    chosen["adapter"] = None if options.adapter is None else ADAPTER
    return SamplingParams(max_tokens=max(1, min(length, room)), **chosen)


def check_media(takes_images: bool, images: object, of_processor: object, videos: object, audio: object) -> None:
    """Check what comes beside token ids. of_processor: what verl tells the processor that reads it.

    Raises:
        RequestError: what is not served, by verl's name.
    """
    given = {"image_data": images, "mm_processor_kwargs": of_processor, "video_data": videos, "audio_data": audio}
    served = ("image_data", "mm_processor_kwargs") if takes_images else ()
    found = [name for name, value in given.items() if value and name not in served]
    if found and takes_images:
        raise RequestError(f"samebit serves text and images: no video or audio, got {', '.join(found)}")
    if found:
        raise RequestError(
            f"samebit serves text only: no images, video or audio, got {', '.join(found)}; images are served with "
            "+actor_rollout_ref.rollout.custom.images=True"
        )


def _constraint(asked: object) -> StructuredOutputsParams | None:
    """Return what a response is constrained to. An agent loop gives it as it is, or as a dict of its fields."""
    if asked is None or isinstance(asked, StructuredOutputsParams):
        return asked
    given = OmegaConf.to_container(asked) if OmegaConf.is_config(asked) else asked
    names = [one.name for one in fields(StructuredOutputsParams)]
    if not isinstance(given, Mapping) or not given.keys() <= set(names):
        raise RequestError(f"structured_outputs must be a dict of one of {', '.join(names)}, got {shown(given)}")
    return StructuredOutputsParams(**given)


def seed_of_resumed(began: int | None, base: int, number: int) -> int | None:
    """Return the seed of a request, by its number, in a run that was resumed at a step: other random numbers than those
    that were drawn before. None in a run from the start, where they are the worker's own."""
    if not began:
        return None
    digest = hashlib.blake2b(f"{base} {began} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def begins_again(output: RequestOutput, params: SamplingParams) -> bool:
    """Return whether the tokens of an aborted request are of no use. verl's client asks for the rest of a response with
    the tokens that it has behind the prompt, where a grammar would not read them, and would begin in their middle."""
    return params.structured_outputs is not None and output.samples[0].finish_reason == "abort"


def finished(output: RequestOutput, *, with_logprobs: bool, steps: StepsOfVersions) -> dict[str, Any]:
    """Return the fields of verl's `TokenOutput`."""
    sample = output.samples[0]
    first, last = _steps(output, steps)
    return {
        "token_ids": sample.token_ids,
        "log_probs": sample.logprobs if with_logprobs else None,
        "routed_experts": _all_routes(output, sample),
        "stop_reason": "aborted" if sample.finish_reason == "abort" else "completed",
        "num_preempted": sum(event.name == "preempted" for event in output.events),
        "extra_fields": {
            "global_steps": last,
            "min_global_steps": first,
            "max_global_steps": last,
            "num_cached_tokens": output.num_cached_tokens,
        },
    }


def _all_routes(output: RequestOutput, sample: SampleOutput) -> npt.NDArray[np.int16] | None:
    """Return the experts of all tokens but the last, whose rows verl takes by their place.

    Zeros stand for what was not computed, of a sample that was aborted while it waited.
    """
    routes = sample.routed_experts
    if routes is None:
        return None
    lacking = len(output.prompt_token_ids) + len(sample.token_ids) - 1 - len(routes)
    return np.pad(routes, ((0, lacking), (0, 0), (0, 0)))


def turned_away(step: int) -> dict[str, Any]:
    """Answer a request that was not let in, or begins again: the client asks another server, or again."""
    return {
        "token_ids": [],
        "log_probs": [],
        "stop_reason": "aborted",
        "extra_fields": {"global_steps": step, "min_global_steps": step, "max_global_steps": step},
    }


def _steps(output: RequestOutput, steps: StepsOfVersions) -> tuple[int, int]:
    """Return the steps of the first and last token; the newest without tokens. Of an adapter, under which a request
    ends as it began, there is one."""
    if output.adapter_version is not None:
        step = steps.of(output.adapter_version)
        return step, step
    spans = output.samples[0].weight_versions
    if not spans:
        return steps.newest, steps.newest
    return steps.of(spans[0][2]), steps.of(spans[-1][2])
