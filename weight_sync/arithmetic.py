"""Name what decides the bits of a forward on a GPU beside the weights: the GPU's kind, and what compiles its kernels.

A trainer and a rollout worker on GPUs of different kinds, or with different compilers, have other bits under the same
weights: one generation's tensor cores add 8 products at once, the next one's 16.
"""

from __future__ import annotations

from importlib import metadata

import torch

_COMPILERS = ("torch", "triton")


def arithmetic_of(device: torch.device) -> str:
    """Return the compute capability and the versions, ``sm_90, torch 2.11.0, triton 3.6.0``; empty for other devices.

    The version of Triton is that of ptxas too, which comes with it.
    """
    if device.type != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return ", ".join([f"sm_{major}{minor}", *(f"{name} {metadata.version(name)}" for name in _COMPILERS)])


def arithmetic_here() -> str:
    """Return that of the current GPU; empty for a process that uses none."""
    return arithmetic_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_initialized() else ""
