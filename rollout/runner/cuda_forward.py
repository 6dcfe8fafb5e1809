"""Run a step's forward call on a device: its arrays go there in one copy, and where a graph fits it is replayed."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.lora.adapters import RowAdapters
from samebit.kernels.layout.transfer import Tensors, sent
from samebit.rollout.memory.shape import Memory
from samebit.rollout.runner.cuda_graphs import StepGraphs, take_drawn
from samebit.rollout.runner.cuda_step_arrays import StepArrays, draws_on_device
from samebit.rollout.runner.logits import StepLogits, logits_of
from samebit.rollout.runner.step_inputs import Ints, StepInputs


class DeviceForward:
    """Implements `samebit.rollout.runner.logits.Forward` on a device. Without `graphs` each step launches its kernels
    one by one."""

    def __init__(self, device: torch.device, graphs: StepGraphs | None) -> None:
        self.device = device
        self.graphs = graphs
        self._item_sizes: frozenset[int] | None = None

    def __call__(self, model: nn.Module, inputs: StepInputs, drawn: torch.Tensor | None) -> StepLogits:
        arrays = StepArrays.of(inputs, self._item_sizes or ())
        graph = None
        if self.graphs is not None and self._item_sizes is not None:  # known from the first step on
            graph = self.graphs.fitting(model, arrays, inputs.context)
        if graph is None:
            parts = take_drawn(sent(arrays.by_name(), self.device), drawn)
            logits = self._launch(model, parts, inputs.context)
        else:
            parts, logits = graph.replay(arrays, drawn)
        return StepLogits(logits[: len(inputs.head_rows)], draws_on_device(parts, len(inputs.sequences)))

    def warm_up(self, model: nn.Module, memory: Memory, block_tables: Ints) -> None:
        """Record the graphs of all decodes, after a first step, which compiles the kernels."""
        if self.graphs is None:
            return
        inputs = _idle_step(memory, block_tables)
        self(model, inputs, None)
        self.graphs.record_decodes(model, StepArrays.of(inputs, self._item_sizes or ()), inputs.context)

    def _launch(self, model: nn.Module, parts: Tensors, context: ForwardContext) -> torch.Tensor:
        context = context.as_sent(parts)
        logits = logits_of(model, parts["token_ids"], parts["head_rows"], context)
        self._item_sizes = frozenset(context.on_device.items_of)
        return logits

    def forget_memory(self) -> None:
        """Forget the graphs, which hold the addresses of pages and states: new ones are recorded when needed."""
        if self.graphs is not None:
            self.graphs.forget()


def _idle_step(memory: Memory, block_tables: Ints) -> StepInputs:
    """Make the arrays of a decode of one sequence, whose one token lies in the null block; nothing is drawn from it."""
    none = np.zeros(1, np.int32)
    context = ForwardContext(
        positions=torch.zeros(1, dtype=torch.int64),
        row_start=none,
        lengths=none + 1,
        starts=none,
        table_rows=none,
        block_tables=np.zeros_like(block_tables),
        block_size=memory.block_size,
        pages=memory.pages,
        write_from=none,
        states=memory.states,
        adapters=RowAdapters.all_through(None),
    )
    return StepInputs.undrawn(context, np.zeros(1, np.int64), np.zeros(1, np.int64))
