"""Compare prompts with images, and the features of images, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samebit.kernels import image_features
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.binding.families.known import family_of
from samebit.kernels.binding.lora.peft_model import inner_model
from samebit.kernels.binding.vision.plan import PlannedVision
from samebit.kernels.binding.wrapped import wrapping_module
from samebit.kernels.layout.images.image_layout import ImageLayout
from samebit.rollout.audit.compare import Row, compare, compare_samples, reported, worst
from samebit.rollout.audit.images.prompts import Scored, alone, batch, of_transformers, prompts_with_images
from samebit.rollout.audit.workers import compared_config
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

UNBOUND_TOKENS = 3
"""Counts the tokens behind each prompt that transformers' own forward scores."""

CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 7, "max_num_seqs": 7}
"""Ends chunks of prompts inside of images."""


@dataclass(frozen=True)
class UnboundImages:
    """Holds what transformers' own forward makes of prompts with images, before samebit's kernels take its place; no
    scores but `trouble` where it does not run."""

    layout: ImageLayout
    scored: Scored
    scores: list[torch.Tensor]
    trouble: str = ""

    @classmethod
    def of(cls, module: Any, longest: int, seed: int) -> UnboundImages | None:
        """Compute prompts of at most so many tokens; None of a module that can not be bound to compute images."""
        layout = planned_images(module)
        if layout is None:
            return None
        vocab_size = module.get_input_embeddings().weight.shape[0]
        made = prompts_with_images(layout, vocab_size, longest - UNBOUND_TOKENS, seed)
        scored = [(prompt, prompt.token_ids[:UNBOUND_TOKENS]) for prompt in made]
        try:
            return cls(layout, scored, of_transformers(module, scored, layout))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # boundary: code of the model, whose kernels may refuse sizes or need packages
            return cls(layout, scored, [], f", which does not run here ({type(error).__name__})")

    def row(self, model: nn.Module) -> Row:
        """Say how far the bound module is from it: roundings, if the binding is right."""
        found = compare(alone(model, self.scored, self.layout), self.scores) if self.scores else (0, 0, 0.0)
        return Row(f"images: beside transformers' own forward{self.trouble}", *found, promised=False)


def planned_images(module: Any) -> ImageLayout | None:
    """Return what a module takes images as once it is bound; None for one that computes text alone."""
    whole = inner_model(module)
    family = family_of(whole)
    if family is None or family.wrapped is None:
        return None
    return PlannedVision.of(family.wrapped.tower, wrapping_module(family, whole), exact=True).layout


class ImagesCheck:
    """Checks a bound model that computes images."""

    def __init__(self, model: nn.Module, layout: ImageLayout, new_tokens: int, limit: int, seed: int) -> None:
        self._model, self._layout = model, layout
        self._prompts = prompts_with_images(layout, binding_of(model).vocab_size, limit - new_tokens, seed)
        self._limit = max(len(prompt.token_ids) for prompt in self._prompts) + new_tokens
        self._params = SamplingParams(n=2, seed=seed, max_tokens=new_tokens, ignore_eos=True)

    def rows(self) -> Iterator[Row]:
        """Yield a row for each way to compute images.

        Raises:
            ValueError: the prefix cache was not hit.
        """
        yield self._features()
        first = self._run()
        yield self._row("many requests at once, whole prefill", first)
        one_by_one = self._one_by_one()
        yield self._row("one request at a time", one_by_one)
        chunked = self._run(**CHUNKED)
        yield self._row("chunked prefill, 7 tokens a step", chunked)
        twice = self._twice()
        yield self._row("prefix cache, cold and warm", twice)
        found = compare(reported(first), batch(self._model, self._scored(first), self._layout))
        yield Row("images: trainer: left padded", *found)
        repeated = worst(compare_samples(one_by_one, first), compare_samples(chunked, first))
        repeated = worst(repeated, compare_samples(twice, first + first))
        yield Row("images: same seed, same samples under all of these", *repeated)

    def _features(self) -> Row:
        """Compare each image's features with those that it has among all others."""
        pixels = torch.cat([prompt.pixel_values for prompt in self._prompts])
        grids = torch.cat([prompt.image_grid_thw for prompt in self._prompts])
        every = image_features(self._model, pixels, grids)
        each = [
            image_features(self._model, own, grid[None])
            for own, grid in zip(pixels.split(grids.prod(1).tolist()), grids, strict=True)
        ]
        return Row("images: features, alone and beside others", *compare(_numbers(each), _numbers([every])))

    def _row(self, name: str, outputs: list[RequestOutput]) -> Row:
        scores = alone(self._model, self._scored(outputs), self._layout)
        return Row(f"images: {name}", *compare(reported(outputs), scores))

    def _scored(self, outputs: list[RequestOutput]) -> Scored:
        """Return the samples behind their prompts, which may have been given several times over."""
        prompts = self._prompts * (len(outputs) // len(self._prompts))
        pairs = zip(prompts, outputs, strict=True)
        return [(prompt, sample.token_ids) for prompt, output in pairs for sample in output.samples]

    def _run(self, **config: Any) -> list[RequestOutput]:
        with self._worker(**config) as worker:
            return worker.generate(self._prompts, self._params)

    def _one_by_one(self) -> list[RequestOutput]:
        with self._worker() as worker:
            return [worker.generate([prompt], self._params)[0] for prompt in self._prompts]

    def _twice(self) -> list[RequestOutput]:
        with self._worker(block_size=self._smallest_block) as worker:
            outputs = [out for _ in ("cold", "warm") for out in worker.generate(self._prompts, self._params)]
            if not any(out.num_cached_tokens for out in outputs[len(self._prompts) :]):
                raise ValueError(f"no prompt with images of {self._limit} tokens was found in the prefix cache")
        return outputs

    @property
    def _smallest_block(self) -> int:
        chunk = binding_of(self._model).ssm_chunk
        return 4 if chunk is None else chunk

    def _worker(self, **config: Any) -> RolloutWorker:
        return RolloutWorker(self._model, config=compared_config(self._model, max_model_len=self._limit, **config))


def _numbers(features: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one.float().flatten() for one in features]
