"""Give memory that was freed back to the system.

glibc keeps freed blocks of less than 32 MiB for itself: of a cache of 45 MiB that a hybrid model put to sleep, none was
returned. `malloc_trim` returns them. On a GPU torch keeps all that was freed, until `empty_cache`.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch


def return_free_memory() -> None:
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    """Return glibc's function; None with another allocator."""
    library = ctypes.CDLL(None)
    return library.malloc_trim if hasattr(library, "malloc_trim") else None
