"""A step's forward call on a device: its arrays go there in one copy, and where a graph fits it is replayed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import numpy as np
import torch
from torch import nn

from samebit.kernels.context import ForwardContext
from samebit.kernels.packing import Arrays, Tensors, sent
from samebit.kernels.triton.layout import layout_parts, on_device
from samebit.rollout.forward import StepLogits, logits_of
from samebit.rollout.sampler import DrawInputs
from samebit.rollout.step_graphs import StepGraphs, take_drawn
from samebit.rollout.step_inputs import StepInputs


class DeviceForward:
    """See `samebit.rollout.forward.Forward`. Without `graphs` each step launches its kernels one by one."""

    def __init__(self, device: torch.device, graphs: StepGraphs | None) -> None:
        self.device = device
        self.graphs = graphs
        self._item_sizes: frozenset[int] | None = None

    def __call__(self, model: nn.Module, inputs: StepInputs, drawn: torch.Tensor | None) -> StepLogits:
        arrays = _arrays(inputs, self._item_sizes or ())
        graph = None
        if self.graphs is not None and self._item_sizes is not None:  # known from the first step on
            graph = self.graphs.fitting(model, arrays, inputs.context)
        if graph is None:
            parts = take_drawn(sent(arrays, self.device), drawn)
            logits = self._launch(model, parts, inputs.context)
        else:
            parts, logits = graph.replay(arrays, drawn)
        return StepLogits(logits[: len(inputs.head_rows)], _draws(parts, len(inputs.sequences)))

    def _launch(self, model: nn.Module, parts: Tensors, context: ForwardContext) -> torch.Tensor:
        context = on_device(context, parts)
        logits = logits_of(model, parts["token_ids"], parts["head_rows"], context)
        self._item_sizes = frozenset(context.on_device.items_of)
        return logits

    def forget_memory(self) -> None:
        """Graphs hold the addresses of pages and states: others are recorded when they are needed."""
        if self.graphs is not None:
            self.graphs.forget()


def _arrays(inputs: StepInputs, item_sizes: Iterable[int]) -> Arrays:
    return {
        "token_ids": inputs.token_ids,
        "sources": np.zeros_like(inputs.token_ids) if inputs.sources is None else inputs.sources,
        "positions": inputs.context.positions.numpy(),
        "head_rows": inputs.head_rows,
        **{f"draw {one.name}": inputs.draws.__dict__[one.name].numpy() for one in fields(DrawInputs)},
        **layout_parts(inputs.context, sorted(item_sizes)),
    }


def _draws(parts: Tensors, count: int) -> DrawInputs:
    return DrawInputs(**{one.name: parts[f"draw {one.name}"][:count] for one in fields(DrawInputs)})
