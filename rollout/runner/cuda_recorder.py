"""Record CUDA graphs, one recorder at a time.

What recording does to a process: torch allows one recording at a time, so recorders take turns. While one is under way
no other thread may draw random numbers on the GPU, empty torch's cache of its memory or wait for the whole of it; a
trainer in the same process does neither while it waits for samples, and workers wait for the recording (`WHOLE_GPU`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samebit.kernels.layout.memory_pool import WHOLE_GPU

Run = Callable[[], None]
Recorder = Callable[[Run], Run]
"""Records a function: what comes back computes the same anew, from the same memory into the same memory."""


class CudaRecorder:
    """Records on one device; what it records shares one pool of memory: a replay spoils what one before it left."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """Run it once before, on the recording's own stream: that compiles its kernels and takes what they keep."""
        graph = torch.cuda.CUDAGraph()
        with WHOLE_GPU:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                run()
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            # thread_local: other threads may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        return graph.replay
