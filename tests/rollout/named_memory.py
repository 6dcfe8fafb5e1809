"""List what has a name in shared memory. Other processes are at work there too, those of tests that run beside."""

import os

_OF_OPENMP = "__KMP_REGISTERED_LIB_"
"""Begins the name that LLVM's OpenMP gives to each process that loads it, for as long as that lives."""


def named_memory() -> set[str]:
    """Return the names; one that comes from elsewhere goes soon, as semaphores and Ray's memory lose theirs at once."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(_OF_OPENMP)}
