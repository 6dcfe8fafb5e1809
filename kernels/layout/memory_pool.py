"""Allocate memory for what lives as long as a worker (KV pages, states, checkpoints), and give back what was freed."""

import ctypes
import math
import threading

import numpy as np
import torch

from samebit.kernels.layout.grids import CACHE_LINE

WHOLE_GPU = threading.Lock()
"""Is held while a CUDA graph is recorded, and by what may not meet a recording of another thread: whoever empties
torch's cache of a GPU, where torch would then do nothing and not say so, or waits for all that runs there."""


@torch.inference_mode(False)  # another thread writes to it, which may not be in that mode
def zeroed_pool(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """Allocate zeros that begin a cache line, on the CPU in huge pages where the system has some.

    A decode step reads a pool all over, so with small pages it waits for their translation as well. NumPy asks the
    system for huge pages (``MADV_HUGEPAGE``), torch does not.
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = torch.from_numpy(np.zeros(size + CACHE_LINE, np.uint8))
    first = -memory.data_ptr() % CACHE_LINE
    return memory[first : first + size].view(dtype).view(shape)


def return_free_memory() -> None:
    """Give memory that was freed back to the system.

    glibc keeps freed blocks of less than 32 MiB for itself: of a cache of 45 MiB that a hybrid model put to sleep, none
    was returned. ``malloc_trim`` returns them. On a GPU torch keeps all that was freed, until ``empty_cache``.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    if torch.cuda.is_initialized():
        empty_gpu_cache()


def empty_gpu_cache() -> None:
    """Give back what torch keeps of the GPUs, once no graph is being recorded."""
    with WHOLE_GPU:
        torch.cuda.empty_cache()
