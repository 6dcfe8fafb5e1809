"""Record a step's forward call in CUDA graphs: one for each size of step. Those of decodes are made when the worker
starts, others, and all after a sleep of the memory that they read, when such a step comes first.

Invariants
----------
* A graph computes a step of its size or a smaller one: what is missing are rows of no sequence, which write to the null
  block, and sequences of length 0, which touch nothing. No result depends on it.
* A graph reads its arrays from one buffer, at places that do not change. Before a replay the whole buffer is written.
* A graph holds the addresses of weights, pages and states, and what the model's modules computed. Addresses of weights,
  and which modules, forwards and hooks there are, are compared before each replay; where one is another, all graphs
  are forgotten, and so they are when pages and states go.
* The graphs share their memory and the place of their logits: what a replay returns is valid until the next one.
* A step of which rows go through adapters is not recorded: which ones, and which rows, differs from step to step.
* A step that can not be recorded is none's: layers that would be recomputed (gradient checkpointing in training mode)
  save the state of the random numbers even without a gradient.

A step whose sequences compute one token each is taken for a decode: its graph has room for as many sequences as rows.
Other steps may have as many sequences as the worker runs at once, and as many rows that are drawn from as it ever has.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from samebit.kernels.binding.binding import binding_of
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.transfer import Packing, Staging, Tensors
from samebit.rollout.runner.cuda_recorder import CudaRecorder, Recorder
from samebit.rollout.runner.cuda_step_arrays import Size, StepArrays
from samebit.rollout.runner.logits import logits_of

SIZES = tuple(sorted({*(1 << power for power in range(16)), *(3 << power for power in range(3, 14))}))
"""Counts of rows that graphs are made for: powers of two, and from 24 on the middles between them."""


class StepGraphs:
    """Holds the graphs of one model on one device."""

    def __init__(self, device: torch.device, max_rows: int, max_sequences: int, max_head_rows: int) -> None:
        """Hold none yet.

        Args:
            max_rows: of a step.
            max_sequences: that run at once.
            max_head_rows: from which tokens are drawn, at least as many.
        """
        self.device = device
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        self.max_head_rows = max_head_rows
        self._record: Recorder | None = None
        self._graphs: dict[Size, StepGraph] = {}
        self._logits: torch.Tensor | None = None
        self._watched: _Watched | None = None

    def fitting(self, model: nn.Module, arrays: StepArrays, context: ForwardContext) -> StepGraph | None:
        """Return the graph for a step with these arrays; None where it scores or captures more than has room."""
        size = self._size(len(arrays.token_ids), len(context.lengths), len(arrays.draw_rows))
        if size is None or _has_adapters(context) or not self._stays_as_recorded(model):
            return None
        if size not in self._graphs:
            room = arrays.room(size, context.block_size)
            if not arrays.fits(room.by_name()):
                return None
            self._graphs[size] = self._recorded(model, room, context)
        graph = self._graphs[size]
        return graph if arrays.fits(graph.places) else None

    def record_decodes(self, model: nn.Module, arrays: StepArrays, context: ForwardContext) -> None:
        """Record the graphs of decodes of every size; ``arrays`` and ``context`` are those of some step.

        The largest comes first: the others find room in the memory that it took.
        """
        if _has_adapters(context) or not self._stays_as_recorded(model):
            return
        for count in sorted({min(size, self.max_sequences) for size in SIZES}, reverse=True):
            size = Size(count, count, count)
            if size not in self._graphs:
                self._graphs[size] = self._recorded(model, arrays.room(size, context.block_size), context)

    def forget(self) -> None:
        """Forget all graphs: pages and states are elsewhere from now on."""
        self._graphs.clear()
        self._record = self._logits = None  # torch refuses a pool again that has lost all its graphs

    def _recorded(self, model: nn.Module, room: StepArrays, context: ForwardContext) -> StepGraph:
        if self._record is None:
            self._record = CudaRecorder(self.device)
        if self._logits is None:
            shape = self.max_head_rows, binding_of(model).vocab_size
            self._logits = torch.empty(shape, dtype=torch.float32, device=self.device)
        return StepGraph(model, room, context, self._record, self._logits[: len(room.head_rows)])

    def _size(self, rows: int, sequences: int, draws: int) -> Size | None:
        decode = rows == sequences and draws <= sequences
        most = self.max_sequences if decode else self.max_rows
        room = next((size for size in SIZES if size >= rows), None)
        if room is None or rows > most:
            return None
        room = min(room, most)
        return Size(room, room, room) if decode else Size(room, self.max_sequences, self.max_head_rows)

    def _stays_as_recorded(self, model: nn.Module) -> bool:
        """Tell whether the model can be recorded; forget what was, where weights have moved."""
        if self._watched is None or self._watched.model is not model:
            self._watched = _Watched(model)
            self.forget()
        if self._watched.changed():
            self.forget()
        return not self._watched.recomputes()


class _Watched:
    """Knows a model's tensors by the places that hold them: a parameter that is replaced has moved too; and its modules
    by their parents, with what is called when they are."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._before: tuple[object, ...] = ()
        self._list_places()

    def changed(self) -> bool:
        """Tell whether a tensor has moved, or another module, forward or hook is there, since the last call."""
        modules = [list(map(id, children.values())) for children in self._children]
        if modules != self._modules:
            self._list_places()
        addresses = [holder[name].data_ptr() for holder, name in self._places]
        hooks = [tuple(hooks) for hooks in self._hooks if hooks]
        forwards = [own.get("forward") for own in self._own]
        before, self._before = self._before, (modules, addresses, hooks, forwards)
        return before != self._before

    def _list_places(self) -> None:
        own = [vars(module) for module in self.model.modules()]
        self._own = own
        self._children: list[dict[str, nn.Module | None]] = [names["_modules"] for names in own if names["_modules"]]
        self._modules = [list(map(id, children.values())) for children in self._children]
        self._hooks = [names[kind] for names in own for kind in ("_forward_pre_hooks", "_forward_hooks")]
        holders = [names[kind] for names in own for kind in ("_parameters", "_buffers")]
        self._places = [(holder, name) for holder in holders for name, tensor in holder.items() if tensor is not None]
        self._layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def recomputes(self) -> bool:
        """Tell whether gradient checkpointing is on and would wrap a call."""
        return any(layer.gradient_checkpointing and layer.training for layer in self._layers)


class StepGraph:
    """Holds a forward call that was recorded."""

    def __init__(
        self, model: nn.Module, room: StepArrays, context: ForwardContext, record: Recorder, logits: torch.Tensor
    ) -> None:
        """Record a call with this room. ``logits``: ``[head rows, V]`` float32, where they go."""
        idle = room.by_name()
        packing = Packing(idle)
        self.logits = logits
        self._staging = Staging(packing.num_bytes, logits.device)
        self.places = packing.on_host(self._staging.memory)
        for name, place in self.places.items():
            place[...] = idle[name]
        self._nothing = self._staging.memory.clone()
        self._buffer = torch.empty(packing.num_bytes, dtype=torch.uint8, device=logits.device)
        self._staging.send(self._buffer)
        self.parts = packing.on_device(self._buffer)
        stand_in = _stand_in(context, len(idle["lengths"]))

        def run() -> None:
            found = logits_of(model, self.parts["token_ids"], self.parts["head_rows"], stand_in.as_sent(self.parts))
            self.logits.copy_(found)

        self._replay = record(run)

    def replay(self, arrays: StepArrays, drawn: torch.Tensor | None) -> tuple[Tensors, torch.Tensor]:
        """Return the arrays on the device, each with room behind it, and the logits of all head rows that it has room
        for."""
        self._staging.wait()
        self._staging.memory.copy_(self._nothing)
        for name, array in arrays.by_name().items():
            self.places[name][: len(array)] = array
        self._staging.send(self._buffer)
        take_drawn(self.parts, drawn)
        self._replay()
        return self.parts, self.logits


def _has_adapters(context: ForwardContext) -> bool:
    return context.adapters is not None and bool(context.adapters.groups)


def take_drawn(parts: Tensors, drawn: torch.Tensor | None) -> Tensors:
    """Return the arrays with the ``drawn`` tokens that "sources" name in place of "token_ids"."""
    if drawn is not None:  # a row that there is only room for takes the first
        torch.index_select(drawn, 0, parts["sources"], out=parts["token_ids"])
    return parts


def _stand_in(context: ForwardContext, sequences: int) -> ForwardContext:
    """Return a context of this many sequences: kernels take the number from it, and all else from what was sent."""
    zeros = np.zeros(sequences, np.int32)
    return replace(
        context, row_start=zeros, lengths=zeros + 1, starts=zeros, table_rows=zeros, write_from=None,
        captures=np.empty((0, 3), np.int32), device_layout=None,
        known={"covers_all_rows": False},  # there may be fewer sequences
    )  # fmt: skip
