"""Say what a recurrent state keeps of what has decayed, and the gradient of an unlikely token: nothing, once that is
next to nothing.

Products of what is left would be subnormal, which some processors compute many times slower.
"""

import torch
from torch.nn import functional as F

GONE = -60.0
"""What has decayed by e to a lower power is 0, and so is the gradient of a token of a lower log-probability.
Arithmetic of the CPU's kernels; on a GPU, of gradients alone."""


def share_left(decay: torch.Tensor) -> torch.Tensor:
    """Return e**x of a decay, 0 from `GONE` down; NaN stays NaN."""
    return F.threshold(decay, GONE, -torch.inf).exp()
