"""Compile and start the Numba kernels.

Invariants: OpenMP is Numba's threading layer (see `openmp`); ``fastmath`` is off; the GIL is released. A
kernel is compiled at its first call for a dtype and kept in Numba's on-disk cache. Of the processes that want it
(ranks of a trainer, actors of Ray) one compiles, the others wait and read its cache.
"""

import fcntl
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from samebit.kernels import openmp  # its import chooses the threading layer
from samebit.kernels.cpu.base.callee import Callee, address_of
from samebit.kernels.cpu.base.kernel_cache import KernelCache
from samebit.kernels.cpu.base.part import OPTIONS, KernelCompiler

_PARALLEL_WORK = 1 << 15
"""With fewer elements, waking the other threads costs more than they save."""


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Pause Python's garbage collector, which would search all objects of the process again and again.

    What compiling leaves is found later: 40 MB after all kernels of a dense model. That runs of several threads overlap
    does no harm.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock among the processes of this machine, or go on without: it saves work, and Numba's cache is safe.

    There is none where the file is another user's, as root's may be, or where the file system has no locks (NFS without
    its daemon, Lustre without ``flock``).
    """
    with ExitStack() as held:
        with suppress(OSError):
            fcntl.flock(held.enter_context(path.open("ab")), fcntl.LOCK_EX)
        yield


class _Kernel(CPUDispatcher):  # type: ignore[misc]  # Numba has no types
    """Compiles a kernel for the dtypes of a call, in one process of this machine at a time (of those of one user).

    Numba's own cache is safe to share but not economical: processes that miss it together all compile, and of what
    they save to a kernel's index the last one wins, so that the others' work is done again in the next run.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function, targetoptions=OPTIONS, pipeline_class=KernelCompiler)
        self._cache = KernelCache(function)

    def compile(self, sig: Any) -> Any:
        """Compile for a signature, or load what any process has compiled."""
        folder = Path(self._cache.cache_path)
        openmp.start_pool()  # what starts threads is known by name to compiled code from then on
        lock = folder / f"{self.py_func.__module__}.{self.py_func.__qualname__}.lock"
        # In this order, as a kernel compiles those that it calls.
        with global_compiler_lock, _one_at_a_time(lock), _garbage_kept():
            return super().compile(sig)


def compile_kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a function that takes no size of its work: it is told the threads itself, or needs none."""
    compiled: Callable[..., None] = _Kernel(function)
    return compiled


def called_kernel(function: Callable[..., None]) -> Callee:
    """Compile a function that several kernels call, and that is long: by itself, once."""
    return Callee(_Kernel(function))


class SharedKernel:
    """Runs a function that shares out its items by `share_out`, among as many threads as its first argument says.

    Attributes:
        part: the kernel, for others that call it.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._compiled = _Kernel(function)
        self.part = Callee(self._compiled)

    def __call__(self, work: int, *args: Any) -> None:
        """Run on ``args``; ``work`` is the number of elements touched."""
        self._compiled(1 if work < _PARALLEL_WORK else openmp.num_threads(), *args)

    def address(self, *args: Any) -> int:
        """Return where the kernel is that takes a number of threads and arguments of these types (`callee.call_at`)."""
        return address_of(self._compiled, (types.int64, *args))


def array(tensor: torch.Tensor) -> Any:
    """Return a contiguous CPU tensor as the NumPy array that kernels take (bfloat16 as uint16), no copy."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


def parameter_array(tensor: torch.Tensor) -> Any:
    """Do as `array`, for what may be a view of a parameter.

    ``Tensor.numpy()`` marks the storage as one that can not be resized, for good, and FSDP2 frees the storage of
    gathered parameters by resizing it; through DLPack there is no mark.
    """
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return np.from_dlpack(tensor)
