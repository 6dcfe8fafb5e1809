"""Which implementation computes: the tensor's device decides, here and nowhere else.

On the CPU a file `kernels/<op>.py` calls `kernels/cpu`; on a GPU it hands over to its namesake in `kernels/triton`,
which is imported by the first tensor that is there: a machine without a GPU needs no Triton.
"""

import torch


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels compute on this tensor."""
    return tensor.is_cuda
