"""Put arrays of several dtypes into one buffer of bytes: what a call needs travels to the device in one copy.

Each array begins at a multiple of sixteen bytes, so kernels see aligned addresses. On CUDA the host's side is pinned
and the copy does not wait. What comes back (`Arrival`) does not either.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout.grids import ceil_div

_ALIGNMENT = 16

Arrays = dict[str, npt.NDArray[Any]]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Part:
    """Says where an array lies, and what it is."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        return self.start + int(np.prod(self.shape)) * self.dtype.itemsize


class Packing:
    """Places named arrays in a buffer of ``num_bytes``."""

    def __init__(self, arrays: Arrays) -> None:
        """Place arrays of these shapes and dtypes; their values do not matter."""
        self._parts: dict[str, _Part] = {}
        end = 0
        for name, array in arrays.items():
            part = _Part(ceil_div(end, _ALIGNMENT) * _ALIGNMENT, array.shape, array.dtype)
            self._parts[name], end = part, part.end
        self.num_bytes = end

    def on_host(self, host: torch.Tensor) -> Arrays:
        """Return each array's place in the host's buffer."""
        memory = host.numpy()
        return {
            name: memory[part.start : part.end].view(part.dtype).reshape(part.shape)
            for name, part in self._parts.items()
        }

    def on_device(self, buffer: torch.Tensor) -> Tensors:
        """Return each array's place in the device's buffer."""
        return {
            name: buffer[part.start : part.end].view(_torch_dtype(part.dtype)).view(part.shape)
            for name, part in self._parts.items()
        }


class Staging:
    """Holds bytes on the host on their way to a device, again and again.

    Attributes:
        memory: ``[num_bytes]`` uint8, pinned for CUDA. Write to it after `wait`.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = _on_host(num_bytes, torch.uint8, pinned=device.type == "cuda")
        self._left = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait until what was sent last has left."""
        if self._left is not None:
            self._left.synchronize()

    def send(self, buffer: torch.Tensor) -> None:
        """Copy to ``buffer`` on the device, without waiting."""
        buffer.copy_(self.memory, non_blocking=True)
        if self._left is not None:
            self._left.record(torch.cuda.current_stream(buffer.device))


def sent(arrays: Arrays, device: torch.device) -> Tensors:
    """Send the arrays to the device, by one copy."""
    packing = Packing(arrays)
    host = _on_host(packing.num_bytes, torch.uint8, pinned=device.type == "cuda")
    for name, place in packing.on_host(host).items():
        place[...] = arrays[name]
    return packing.on_device(host.to(device, non_blocking=True))


class Arrival:
    """Copies a tensor to the host; on CUDA the caller goes on meanwhile, and waits only in `numpy`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._there = tensor, None
        if tensor.is_cuda:
            self._host = _on_host(tensor.shape, tensor.dtype, pinned=True)
            self._host.copy_(tensor, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(tensor.device))

    def numpy(self) -> npt.NDArray[Any]:
        """Wait until the values have arrived, and return them."""
        if self._there is not None:
            self._there.synchronize()
        return self._host.numpy()


def indices(numbers: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Send index numbers to the device, without waiting for it."""
    return torch.from_numpy(numbers) if device.type == "cpu" else sent({"numbers": numbers}, device)["numbers"]


def _on_host(shape: int | torch.Size, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Make room on the host, also where a caller has made a GPU torch's default device."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
