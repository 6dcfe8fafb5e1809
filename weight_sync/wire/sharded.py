"""Gather a tensor whose rows are spread over ranks (FSDP2, DTensor), part by part.

Invariants
----------
* The parts are flat, in row-major order, at most `PART_BYTES` each in the dtype of the shards, whatever a rank casts
  them to, and begin at multiples of 64 bytes. No rank holds more of the whole than two of them.
* Every part is a collective: all ranks of the mesh go through `parts()`, `whole()` or `exhaust()` together, once. One
  that stops between two parts exhausts the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Shard

from samebit.weight_sync.wire.buckets import ALIGN

PART_BYTES = 1 << 20


class Sharded:
    """Gathers a sharded tensor, each part of which is cast to `dtype`."""

    def __init__(self, tensor: DTensor, dtype: torch.dtype) -> None:
        self.shape = tensor.shape
        self.dtype = dtype
        self._left = _broadcasts(tensor)

    def parts(self) -> Iterator[Tensor]:
        """Yield the parts; the rank that holds a part broadcasts it to all."""
        step = ALIGN // self.dtype.itemsize
        carried = torch.empty(0, dtype=self.dtype)
        for part in self._left:
            joined = torch.cat([carried.to(part.device), part.to(self.dtype)])
            cut = joined.numel() // step * step
            if cut:
                yield joined[:cut]
            carried = joined[cut:]
        if carried.numel():
            yield carried

    def whole(self) -> Tensor:
        parts = list(self.parts())
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)
        return flat.view(self.shape)

    def exhaust(self) -> None:
        """Take part in gathering what is left, and drop it."""
        deque(self._left, maxlen=0)


def in_parts(tensor: DTensor) -> bool:
    """Return whether a tensor can be gathered in parts: it is split by rows over a mesh of one dimension."""
    return tensor.device_mesh.ndim == 1 and tuple(tensor.placements) == (Shard(0),)


def _broadcasts(tensor: DTensor) -> Iterator[Tensor]:
    mesh, local = tensor.device_mesh, tensor.to_local().detach().reshape(-1)
    group, me = mesh.get_group(), mesh.get_local_rank()
    most = PART_BYTES // local.dtype.itemsize
    for owner, count in enumerate(_shares(tensor)):
        for begin in range(0, count, most):
            size = min(most, count - begin)
            part = local[begin : begin + size].contiguous() if owner == me else local.new_empty(size)
            dist.broadcast(part, dist.get_global_rank(group, owner), group)
            yield part


def _shares(tensor: DTensor) -> list[int]:
    """Return the number of elements on each rank of the mesh; rows are split as by `torch.chunk`."""
    ranks, rows = tensor.device_mesh.size(), tensor.shape[0]
    each = -(-rows // ranks)
    width = tensor.shape[1:].numel()
    return [max(0, min(each, rows - rank * each)) * width for rank in range(ranks)]
