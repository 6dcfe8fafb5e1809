"""Set up the threads with which a worker computes: the generation thread, those of commands, and the workers of each.

Invariants
----------
* While the generation thread sleeps it has no workers of OpenMP: libgomp would let those of a trainer sleep at once.
* Its team, which kernels compute with on a CPU, sleeps then, and leaves its processors to others.
* Neither is bound to the place of OpenMP that the caller's thread may be bound to.
* On a GPU the generation thread and the clerk launch on the default stream, a command in another thread on its
  caller's. What callers have launched on a stream of their own comes first, and theirs waits for the worker's: weights
  that an optimizer writes there are read when they are there, and those that arrive are there when it goes on.
"""

import os
from pathlib import Path

import numba
import torch

from samebit.kernels.openmp import release_idle_threads, start_pool
from samebit.kernels.openmp_runtimes import leave_place, places
from samebit.kernels.team.team import Team, teams_run_here
from samebit.weight_sync.transports.container import ROOT, processors


class ComputeThreads:
    """Knows how many threads compute, on which device, and whether the workers are there.

    Args:
        num_threads: of each thread that computes; None for as many as the calling thread has, which builds the worker.
        device: where the model is.
        root: of the file system, where a container's limits are read.
    """

    def __init__(self, num_threads: int | None = None, device: torch.device | None = None, root: Path = ROOT) -> None:
        start_pool()
        most = min(filter(None, (processors(root), len(places()))), default=None)
        own = numba.get_num_threads()
        fewer: bool = own < numba.config.NUMBA_DEFAULT_NUM_THREADS
        self._of_torch = num_threads or _within(most, torch.get_num_threads(), "OMP_NUM_THREADS")
        self._of_numba = num_threads or _within(most, own, "NUMBA_NUM_THREADS", chosen=fewer)
        self._device = device or torch.device("cpu")
        self._team: Team | None = None
        self._gathered = False

    def set_up(self) -> None:
        """Give the calling thread its thread counts and its current CUDA device."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        torch.set_num_threads(self._of_torch)
        numba.set_num_threads(self._of_numba)

    def follow_caller(self) -> None:
        """Let what the worker's threads launch from now on wait for what the calling thread has launched: on a GPU all
        threads share a stream, but for one that has chosen another (`torch.cuda.stream`)."""
        if self._device.type != "cuda":
            return
        own, shared = torch.cuda.current_stream(self._device), torch.cuda.default_stream(self._device)
        if own != shared:
            shared.wait_stream(own)
            own.wait_stream(shared)

    def gather(self) -> None:
        """Make sure, in the generation thread, that its team is there: on a CPU, each thread at a place of its own."""
        if self._gathered:
            return
        leave_place()  # before the team starts, which inherits it
        if self._team is None and self._device.type == "cpu" and self._of_numba > 1 and teams_run_here():
            self._team = Team(self._of_numba)
        if self._team is not None:
            self._team.take_places()
        self._gathered = True

    def dismiss(self) -> None:
        """Let the team of the generation thread, which is about to sleep, leave its places, and end other workers."""
        release_idle_threads()
        if self._team is not None:
            self._team.leave_places()
        self._gathered = False

    def end(self) -> None:
        """End the team of the generation thread, which is about to end."""
        if self._team is not None:
            self._team.end()


def _within(most: int | None, count: int, variable: str, *, chosen: bool = False) -> int:
    """Return a number of threads, at most ``most`` unless it was chosen, by a variable of the environment or so.

    Torch does not tell its default, as many threads as processors or cores, from a number that was set.
    """
    return count if most is None or chosen or variable in os.environ else min(count, most)
