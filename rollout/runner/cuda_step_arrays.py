"""Hold the arrays of a step that go to a device in one copy.

Invariant: a step's arrays fit a room whatever they hold. What a room has beyond them computes nothing: rows of no
sequence, sequences of length 0, draws that are not read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from samebit.kernels.layout.attention_work import room_for_items
from samebit.kernels.layout.device_layout import layout_parts
from samebit.kernels.layout.transfer import Arrays, Tensors
from samebit.rollout.runner.sampler import DrawInputs
from samebit.rollout.runner.step_inputs import Rows, StepInputs

Array = npt.NDArray[Any]

_OF_ROWS = ("positions", "queries", "blocks", "offsets", "sequences", "within")
_OF_SEQUENCES = ("row_start", "lengths", "starts", "slots", "tables")


@dataclass(frozen=True)
class Size:
    """Counts the rows, the sequences they may be of, and the rows that reach the head, for which there is room."""

    rows: int
    sequences: int
    head_rows: int


@dataclass(frozen=True, eq=False)
class StepArrays:
    """Holds what the module, the draws and the kernels read of a step of T rows, K head rows and R draws.

    token_ids, sources: ``[T]``. head_rows: ``[K]``. draw_rows, temperatures, keys, counters: see `DrawInputs`.
    layout: what the kernels read, by the names that they know.
    """

    token_ids: Rows
    sources: Rows
    head_rows: Rows
    draw_rows: Array
    temperatures: Array
    keys: Array
    counters: Array
    layout: Arrays

    @staticmethod
    def of(inputs: StepInputs, item_sizes: Iterable[int]) -> StepArrays:
        """Gather the arrays of a step; `item_sizes`: for how many tokens the kernels will ask for work items."""
        return StepArrays(
            token_ids=inputs.token_ids,
            sources=np.zeros_like(inputs.token_ids) if inputs.sources is None else inputs.sources,
            head_rows=inputs.head_rows,
            draw_rows=inputs.draws.rows.numpy(),
            temperatures=inputs.draws.temperatures.numpy(),
            keys=inputs.draws.keys.numpy(),
            counters=inputs.draws.counters.numpy(),
            layout={
                "positions": inputs.context.positions.numpy(),
                **layout_parts(inputs.context, inputs.context.work, sorted(item_sizes)),
            },
        )

    def by_name(self) -> Arrays:
        """Return all arrays in one dict, as they are packed."""
        return {**{name: array for name, array in vars(self).items() if name != "layout"}, **self.layout}

    def fits(self, places: Arrays) -> bool:
        """Tell whether each array has room in its place."""
        return all(
            len(array) <= len(places[name]) and array.shape[1:] == places[name].shape[1:]
            for name, array in self.by_name().items()
        )

    def room(self, size: Size, block_size: int) -> StepArrays:
        """Return the arrays of a step that computes nothing, with room for any step of this size.

        ``block_size``: the tokens of a block in the tables.
        """
        return StepArrays(
            token_ids=_zeros(self.token_ids, size.rows),
            sources=_zeros(self.sources, size.rows),
            head_rows=_zeros(self.head_rows, size.head_rows),
            draw_rows=_zeros(self.draw_rows, size.head_rows),
            temperatures=_zeros(self.temperatures, size.head_rows) + 1,
            keys=_zeros(self.keys, size.head_rows),
            counters=_zeros(self.counters, size.head_rows),
            layout=_layout_room(self.layout, size, block_size),
        )


def draws_on_device(parts: Tensors, count: int) -> DrawInputs:
    """Return what the first `count` draws need, of arrays that were sent."""
    return DrawInputs(
        rows=parts["draw_rows"][:count],
        temperatures=parts["temperatures"][:count],
        keys=parts["keys"][:count],
        counters=parts["counters"][:count],
    )


def _zeros(array: Array, count: int) -> Array:
    return np.zeros((count, *array.shape[1:]), array.dtype)


def _layout_room(layout: Arrays, size: Size, block_size: int) -> Arrays:
    # one more, that is always empty; and never as many as rows, which would say that each computes one
    sequences = size.sequences + 1 + (size.sequences + 1 == size.rows)
    counts = {
        **dict.fromkeys(_OF_ROWS, size.rows),
        **dict.fromkeys(_OF_SEQUENCES, sequences),
        "first_capture": sequences + 1,
        "captures": size.sequences,
    }
    longest = layout["tables"].shape[1] * block_size
    room = {
        name: _zeros(array, counts[name])
        if name in counts
        else room_for_items(name, size.rows, size.sequences, longest)
        for name, array in layout.items()
    }
    room["sequences"][:] = -1
    return room
