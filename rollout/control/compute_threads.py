"""Set up the threads with which a worker computes: the generation thread, those of commands, and the workers of each.

Invariant: while the generation thread sleeps it has no workers: libgomp would let those of a trainer sleep at once.
"""

import numba
import torch

from samebit.kernels.openmp import release_idle_threads, start_pool
from samebit.kernels.worker_places import bind_workers


class ComputeThreads:
    """Knows how many threads compute, on which device, and whether the workers are there.

    Args:
        num_threads: of each thread that computes; None for as many as the calling thread has, which builds the worker.
        device: where the model is.
    """

    def __init__(self, num_threads: int | None = None, device: torch.device | None = None) -> None:
        start_pool()
        self._of_torch = num_threads or torch.get_num_threads()
        self._of_numba = num_threads or numba.get_num_threads()
        self._device = device or torch.device("cpu")
        self._gathered = False

    def set_up(self) -> None:
        """Give the calling thread its thread counts and its current CUDA device."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        torch.set_num_threads(self._of_torch)
        numba.set_num_threads(self._of_numba)

    def gather(self) -> None:
        """Make sure, in the generation thread, that its workers are there: on a CPU, each at a place of its own."""
        if not self._gathered and self._device.type == "cpu":
            bind_workers()
        self._gathered = True

    def dismiss(self) -> None:
        """End the workers of the generation thread, which is about to sleep."""
        release_idle_threads()
        self._gathered = False
