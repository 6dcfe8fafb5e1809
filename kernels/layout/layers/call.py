"""Hold what a device makes of a decoder layer before it computes it, alone or behind others.

Invariant: one that reads chosen tokens is made for the rows of one step.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, eq=False)
class LayerCall:
    """Holds what computes a layer, as one entry of a list of calls; only the device that made it reads it.

    Attributes:
        kernel: its address.
        record: numbers that the kernel reads, among them addresses: those of parameters and of what the layer keeps.
        room: bytes that it needs for what is between its kernels, of each row and of the layer.
        apart: another MLP follows behind the call, which gives that one's input.
        chosen: the tokens that its rows read, for the next layers, as soon as it is computed; None where all are read.
    """

    kernel: int
    record: npt.NDArray[np.int64]
    room: tuple[int, int]
    apart: bool
    chosen: torch.Tensor | None = None

    @cached_property
    def record_at(self) -> int:
        """Return the address of the record: NumPy takes a microsecond to say it."""
        return self.record.ctypes.data
