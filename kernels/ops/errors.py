"""Raise the errors that several operations have, in the same words."""

import torch


def changed_dtype(given: str, memory: str, dtype: torch.dtype) -> TypeError:
    """Return the error for inputs of another dtype than the memory that a worker allocated for them."""
    return TypeError(
        f"{given}, but the {memory} are {dtype}: the model changed its dtype after the rollout worker was built"
    )
