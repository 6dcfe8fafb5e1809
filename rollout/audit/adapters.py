"""Check the adapter of a folder in peft's format: as a trainer has it, and as a worker loads it by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samebit.kernels import bind
from samebit.rollout.adapters.layout import NO_PEFT
from samebit.rollout.adapters.names_with_vision import WITH_VISION, layers_named
from samebit.rollout.adapters.registry import FIRST
from samebit.rollout.audit.compare import Row, compare, reported, worst
from samebit.rollout.audit.trainer_layouts import Sample, packed
from samebit.rollout.config import RolloutConfig
from samebit.rollout.errors import AdapterError
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker
from samebit.weight_sync.source import open_source


@dataclass(frozen=True, eq=False)
class TrainersAdapter:
    """Holds a model with an adapter as peft gives it to a trainer, and what else is compared with it.

    base: the same model without it. merged: with the adapter added to its weights.
    """

    model: nn.Module
    base: nn.Module
    merged: nn.Module
    folder: Path

    @classmethod
    def of(cls, base: nn.Module, folder: Path) -> TrainersAdapter:
        """Put the adapter of a folder into a copy of a model, which is not bound yet.

        Raises:
            AdapterError: peft can not read it.
        """
        try:
            from peft import PeftModel
        except ImportError as error:
            raise AdapterError(NO_PEFT) from error
        model = copy.deepcopy(base)
        with open_source(folder) as saved:
            vision = any(WITH_VISION in name for name in saved.specs())
        with layers_named(model, vision=vision):
            adapted: Any = PeftModel.from_pretrained(model, str(folder))
        merged = copy.deepcopy(adapted).merge_and_unload()
        return cls(adapted, bind(base), bind(merged), folder)

    def rows(
        self, requests: tuple[list[list[int]], list[SamplingParams]], first: list[RequestOutput], config: RolloutConfig
    ) -> Iterator[Row]:
        """Compare requests that go through the adapter and through the model alone, in one batch; then, for what it
        tells, the trainer's log-probabilities of merged weights."""
        prompts, wanted = requests
        mixed = [replace(one, adapter=name) for name in (FIRST, "__base__") for one in wanted]
        with RolloutWorker(self.base, config=config) as worker:
            worker.load_adapter(FIRST, self.folder)
            outputs = worker.generate([*prompts, *prompts], mixed)
        adapted, alone = outputs[: len(prompts)], outputs[len(prompts) :]
        same = compare(reported(adapted), reported(first))
        through = compare(reported(adapted), packed(self.model, _samples(adapted), 1.0))
        yield Row("adapter: loaded by name, beside the model alone", *worst(same, through))
        adapters: Any = self.model
        with adapters.disable_adapter():
            disabled = packed(self.model, _samples(alone), 1.0)
        reference = compare(disabled, packed(self.base, _samples(alone), 1.0))
        yield Row("adapter: disabled", *worst(compare(reported(alone), disabled), reference))
        with torch.no_grad():
            merged = packed(self.merged, _samples(first), 1.0)
        yield Row("adapter: merged, which is another policy", *compare(reported(first), merged), promised=False)


def _samples(outputs: list[RequestOutput]) -> list[Sample]:
    return [Sample(out.prompt_token_ids, sample.token_ids) for out in outputs for sample in out.samples]
