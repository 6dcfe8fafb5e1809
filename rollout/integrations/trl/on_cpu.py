"""Let TRL's AsyncGRPO be built where there is no CUDA: its constructor asks CUDA for the name of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from trl.experimental.async_grpo import async_grpo_trainer


@contextmanager
def without_peak_flops() -> Iterator[None]:
    """Answer, inside the block and where there is no CUDA, that the peak of this device is unknown.

    TRL then logs no MFU, as for any device that it does not know.
    """
    if torch.cuda.is_available():
        yield
        return
    with patch.object(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None):
        yield
