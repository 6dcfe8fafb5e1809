"""The memory through which weights go from one process to another.

Invariants
----------
* It is an unnamed file that only its owner may open: whatever dies, the system frees it with the last process
  that has it open. (`multiprocessing.shared_memory` has a name, which a killed process may leave behind.)
* All of it is reserved when it is made: a full /dev/shm is an error then, not a crash while it is written.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np

from samebit.weight_sync.checksum import Bytes

NUM_BUCKETS = 2
_SHARED = Path("/dev/shm")


class SharedBuckets:
    """The mapped memory. The sender may write, the receiver only read."""

    def __init__(self, descriptor: int, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._array = np.frombuffer(mapped, np.uint8)
        self._closer = weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor

    @classmethod
    def create(cls, bucket_bytes: int) -> SharedBuckets:
        """Raises `OSError` when there is no room."""
        size = NUM_BUCKETS * bucket_bytes
        with tempfile.TemporaryFile(dir=_SHARED if _SHARED.is_dir() else None) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise OSError(error.errno, f"no room for {size} bytes of shared memory: {error.strerror}") from error
            return cls(os.dup(file.fileno()), mmap.mmap(file.fileno(), size))

    @classmethod
    def attach(cls, descriptor: int) -> SharedBuckets:
        return cls(descriptor, mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))

    def bucket(self, number: int) -> Bytes:
        size = self._array.size // NUM_BUCKETS
        return self._array[number * size : (number + 1) * size]
