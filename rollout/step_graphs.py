"""CUDA graphs of a step's forward call: one for each size of step, recorded when such a step comes first.

Invariants
----------
* A graph computes a step of its size or a smaller one: what is missing are rows of no sequence, which write to the null
  block, and sequences of length 0, which touch nothing. No result depends on it.
* A graph reads its arrays from one buffer, at places that do not change. Before a replay the whole buffer is written.
* A graph holds the addresses of weights, pages and states. Those of the weights are compared before each replay; where
  one has moved, all graphs are forgotten, and so they are when pages and states go.
* The graphs share their memory and the place of their logits: what a replay returns is valid until the next one.
* A step that can not be recorded is none's: layers that would be recomputed (gradient checkpointing in training mode)
  save the state of the random numbers even without a gradient.

A step whose sequences compute one token each is taken for a decode: its graph has room for as many sequences as rows.
Other steps may have as many sequences as the worker runs at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from samebit.kernels.binding import binding_of
from samebit.kernels.context import ForwardContext
from samebit.kernels.packing import Arrays, Packing, Staging, Tensors
from samebit.kernels.triton.layout import on_device
from samebit.kernels.triton.work import room_for_items
from samebit.rollout.cuda_recorder import CudaRecorder, Recorder
from samebit.rollout.forward import logits_of

SIZES = tuple(sorted({*(1 << power for power in range(16)), *(3 << power for power in range(3, 14))}))
"""Rows that graphs are made for: powers of two, and from 24 on the middles between them."""

_ROWS = ("token_ids", "sources", "positions", "queries", "blocks", "offsets", "sequences", "within")
_SEQUENCES = ("row_start", "lengths", "starts", "slots", "tables")


@dataclass(frozen=True)
class Size:
    """Room for so many rows of so many sequences."""

    rows: int
    sequences: int


class StepGraphs:
    """The graphs of one model on one device."""

    def __init__(self, device: torch.device, max_rows: int, max_sequences: int) -> None:
        self.device = device
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        self._record: Recorder | None = None
        self._graphs: dict[Size, StepGraph] = {}
        self._logits: torch.Tensor | None = None
        self._watched: _Watched | None = None

    def fitting(self, model: nn.Module, arrays: Arrays, context: ForwardContext) -> StepGraph | None:
        """The graph for a step with these arrays; None where it scores or captures more than there is room for."""
        size = self._size(len(arrays["sequences"]), len(context.lengths), len(arrays["draw rows"]))
        if size is None or not self._stays_as_recorded(model):
            return None
        if size not in self._graphs:
            room = _room(arrays, size)
            if not _fits(arrays, room):
                return None
            self._graphs[size] = self._recorded(model, room, context)
        graph = self._graphs[size]
        return graph if _fits(arrays, graph.places) else None

    def forget(self) -> None:
        """Pages and states are others from now on."""
        self._graphs.clear()
        self._record = self._logits = None  # torch refuses a pool again that has lost all its graphs

    def _recorded(self, model: nn.Module, room: Arrays, context: ForwardContext) -> StepGraph:
        if self._record is None:
            self._record = CudaRecorder(self.device)
        if self._logits is None:
            shape = self.max_sequences, binding_of(model).vocab_size
            self._logits = torch.empty(shape, dtype=torch.float32, device=self.device)
        return StepGraph(model, room, context, self._record, self._logits[: len(room["head_rows"])])

    def _size(self, rows: int, sequences: int, draws: int) -> Size | None:
        decode = rows == sequences and draws <= sequences
        most = self.max_sequences if decode else self.max_rows
        room = next((size for size in SIZES if size >= rows), None)
        if room is None or rows > most:
            return None
        room = min(room, most)
        return Size(room, room if decode else self.max_sequences)

    def _stays_as_recorded(self, model: nn.Module) -> bool:
        """Whether the model can be recorded; forgets what was, where weights have moved."""
        if self._watched is None or self._watched.model is not model:
            self._watched = _Watched(model)
            self.forget()
        if self._watched.moved():
            self.forget()
        return not self._watched.recomputes()


class _Watched:
    """A model's tensors by the places that hold them: a parameter that is replaced has moved too."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        holders = [vars(module)[kind] for module in model.modules() for kind in ("_parameters", "_buffers")]
        self._places = [(holder, name) for holder in holders for name, tensor in holder.items() if tensor is not None]
        self._layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        self._addresses: list[int] = []

    def moved(self) -> bool:
        """Since the last call."""
        before, self._addresses = self._addresses, [holder[name].data_ptr() for holder, name in self._places]
        return before != self._addresses

    def recomputes(self) -> bool:
        """Whether gradient checkpointing is on and would wrap a call."""
        return any(layer.gradient_checkpointing and layer.training for layer in self._layers)


class StepGraph:
    """One recorded forward call."""

    def __init__(
        self, model: nn.Module, room: Arrays, context: ForwardContext, record: Recorder, logits: torch.Tensor
    ) -> None:
        """``logits``: ``[head rows, V]`` float32, where they go."""
        packing = Packing(room)
        self.logits = logits
        self._staging = Staging(packing.num_bytes, logits.device)
        self.places = packing.on_host(self._staging.memory)
        for name, place in self.places.items():
            place[...] = room[name]
        self._nothing = self._staging.memory.clone()
        self._buffer = torch.empty(packing.num_bytes, dtype=torch.uint8, device=logits.device)
        self._staging.send(self._buffer)
        self.parts = packing.on_device(self._buffer)
        empty = _empty(context, len(room["lengths"]))

        def run() -> None:
            found = logits_of(model, self.parts["token_ids"], self.parts["head_rows"], on_device(empty, self.parts))
            self.logits.copy_(found)

        self._replay = record(run)

    def replay(self, arrays: Arrays, drawn: torch.Tensor | None) -> tuple[Tensors, torch.Tensor]:
        """The arrays on the device, each with room behind it, and the logits of all head rows there is room for."""
        self._staging.wait()
        self._staging.memory.copy_(self._nothing)
        for name, array in arrays.items():
            self.places[name][: len(array)] = array
        self._staging.send(self._buffer)
        take_drawn(self.parts, drawn)
        self._replay()
        return self.parts, self.logits


def take_drawn(parts: Tensors, drawn: torch.Tensor | None) -> Tensors:
    """The same arrays, with those of the ``drawn`` tokens that "sources" name in place of "token_ids"."""
    if drawn is not None:  # a row that there is only room for takes the first
        torch.index_select(drawn, 0, parts["sources"], out=parts["token_ids"])
    return parts


def _room(arrays: Arrays, size: Size) -> Arrays:
    """Arrays of a step that computes nothing, with room for any step of this size."""
    # one more, that is always empty; and never as many as rows, which would say that each computes one
    sequences = size.sequences + 1 + (size.sequences + 1 == size.rows)
    counts = {
        **dict.fromkeys(_ROWS, size.rows),
        **dict.fromkeys(_SEQUENCES, sequences),
        "first_capture": sequences + 1,
        "captures": size.sequences,
        "head_rows": size.sequences,
    }
    room = {}
    for name, array in arrays.items():
        if name.startswith("draw "):
            count = size.sequences
        elif name in counts:
            count = counts[name]
        else:
            room[name] = room_for_items(name, size.rows, size.sequences)
            continue
        room[name] = np.zeros((count, *array.shape[1:]), array.dtype)
    room["sequences"][:] = -1
    room["draw temperatures"][:] = 1
    return room


def _fits(arrays: Arrays, room: Arrays) -> bool:
    return all(
        len(array) <= len(room[name]) and array.shape[1:] == room[name].shape[1:] for name, array in arrays.items()
    )


def _empty(context: ForwardContext, sequences: int) -> ForwardContext:
    """The context of a step of so many sequences, none of which computes anything."""
    nothing = np.zeros(sequences, np.int32)
    return replace(
        context, row_start=nothing, lengths=nothing, starts=nothing, table_rows=nothing, write_from=None,
        captures=np.empty((0, 3), np.int32), device_layout=None,
    )  # fmt: skip
