"""Check what an operation is given before its kernel starts: kernels take addresses, and read what lies there.

Invariant: a check reads no data, only shapes, dtypes and devices; it costs less than a microsecond.
"""

import torch

from samebit.kernels.layout.device import DTYPES


def check_shape(name: str, tensor: torch.Tensor, *allowed: int) -> None:
    """Raise ValueError unless the tensor has this shape."""
    if tensor.shape != allowed:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}; allowed: {list(allowed)}")


def check_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raise TypeError unless the tensor has one of these dtypes."""
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} is {tensor.dtype}; allowed: {', '.join(map(str, allowed))}")


def check_host(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the tensor is in the host's memory, and its memory is there."""
    if not tensor.is_cpu:
        raise ValueError(
            f"{name} is on {tensor.device}, what it is computed with on the CPU; allowed: one device for all"
        )
    if not tensor.data_ptr() and tensor.numel():
        raise ValueError(f"{name} has the shape {list(tensor.shape)} and no memory: its storage was freed")


def check_readable(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError unless the tensor has values, one after the other."""
    if tensor.is_meta:
        raise TypeError(f"{name} is on the device 'meta', which holds no values; allowed: a tensor that does")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is {tensor.layout}; allowed: a dense tensor")


def check_dtype_of_cpu(dtype: torch.dtype) -> None:
    """Raise TypeError unless the kernels of the CPU compute in this dtype."""
    allowed = DTYPES["cpu"]
    if dtype not in allowed:
        raise TypeError(f"the elements are {dtype}; allowed on the CPU: {', '.join(map(str, allowed))}")
