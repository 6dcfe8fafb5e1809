"""CUDA graphs of a step's forward call: one for each size of step, recorded when such a step comes first.

Invariants
----------
* A graph computes a step of its size or a smaller one: what is missing are rows of no sequence, which write to the null
  block, and sequences of length 0, which touch nothing. No result depends on it.
* A graph reads its arrays from one buffer, at places that do not change. Before a replay the whole buffer is written.
* A graph holds the addresses of weights, pages and states. They are compared before each replay; where one has moved,
  all graphs are forgotten.
* The graphs share their memory: what a replay returns is valid until the next one.

A step whose sequences compute one token each is taken for a decode: its graph has room for as many sequences as rows.
Other steps may have as many sequences as the worker runs at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from samebit.kernels.context import ForwardContext
from samebit.kernels.packing import Arrays, Packing, Staging, Tensors
from samebit.kernels.triton.layout import on_device, room_for_tiles
from samebit.rollout.forward import logits_of

SIZES = tuple(sorted({*(1 << power for power in range(16)), *(3 << power for power in range(3, 14))}))
"""Rows that graphs are made for: powers of two, and from 24 on the middles between them."""

_ROWS = ("token_ids", "positions", "blocks", "offsets", "sequences", "within")
_SEQUENCES = ("row_start", "lengths", "starts", "slots", "tables")

Run = Callable[[], torch.Tensor]
Recorder = Callable[[Run], tuple[torch.Tensor, Callable[[], None]]]
"""Records a function of nothing: what it returns, and what computes that anew in the same place."""


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
        self.record: Recorder = CudaRecorder()
        self._graphs: dict[Size, StepGraph] = {}
        self._weights: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._model: nn.Module | None = None

    def fitting(self, model: nn.Module, arrays: Arrays, context: ForwardContext) -> StepGraph | None:
        """The graph for a step with these arrays; None where it scores or captures more than there is room for."""
        size = self._size(len(arrays["sequences"]), len(context.lengths), len(arrays["draw rows"]))
        if size is None:
            return None
        self._check_addresses(model)
        if size not in self._graphs:
            room = _room(arrays, size)
            if not _fits(arrays, room):
                return None
            self._graphs[size] = StepGraph(model, room, context, self.record, self.device)
        graph = self._graphs[size]
        return graph if _fits(arrays, graph.places) else None

    def forget(self) -> None:
        """Pages and states are others from now on."""
        self._graphs.clear()

    def _size(self, rows: int, sequences: int, draws: int) -> Size | None:
        decode = rows == sequences and draws <= sequences
        most = self.max_sequences if decode else self.max_rows
        room = next((size for size in SIZES if size >= rows), None)
        if room is None or rows > most:
            return None
        room = min(room, most)
        return Size(room, room if decode else self.max_sequences)

    def _check_addresses(self, model: nn.Module) -> None:
        if model is not self._model:
            self._model = model
            self._weights = [*model.parameters(), *model.buffers()]
        addresses = [weight.data_ptr() for weight in self._weights]
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = addresses


class StepGraph:
    """One recorded forward call."""

    def __init__(
        self, model: nn.Module, room: Arrays, context: ForwardContext, record: Recorder, device: torch.device
    ) -> None:
        packing = Packing(room)
        self._staging = Staging(packing.num_bytes, device)
        self.places = packing.on_host(self._staging.memory)
        for name, place in self.places.items():
            place[...] = room[name]
        self._nothing = self._staging.memory.clone()
        self._buffer = self._nothing.to(device, copy=True)
        self.parts = packing.on_device(self._buffer)
        empty = _empty(context, len(room["lengths"]))

        def run() -> torch.Tensor:
            return logits_of(model, self.parts["token_ids"], self.parts["head_rows"], on_device(empty, self.parts))

        self.logits, self._replay = record(run)

    def replay(self, arrays: Arrays) -> tuple[Tensors, torch.Tensor]:
        """The arrays on the device, each with room behind it, and the logits of all head rows there is room for."""
        self._staging.wait()
        self._staging.memory.copy_(self._nothing)
        for name, array in arrays.items():
            self.places[name][: len(array)] = array
        self._staging.send(self._buffer)
        self._replay()
        return self.parts, self.logits


class CudaRecorder:
    """Records on the current CUDA device; all that it records shares one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Run) -> tuple[torch.Tensor, Callable[[], None]]:
        """Runs it once before, which compiles its kernels."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        run()
        graph = torch.cuda.CUDAGraph()
        # thread_local: a trainer's thread may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        return out, graph.replay


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
            room[name] = room_for_tiles(name, size.rows, size.sequences)
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
