"""Share the memory through which weights go from one process to another: a sealed memory file.

Invariants
----------
* It has no name: the system frees it when the last process that has it open ends.
* All of it is reserved when it is made, and sealed: neither side can cut it off under the other, nor take a seal away.
  Only the sender can write, through the mapping that it made before (where the system has that seal, Linux 5.1).
* The receiver gets a descriptor for reading, and maps it after it has checked seals and size.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import weakref
from pathlib import Path

import numpy as np

from samebit.weight_sync.digest import Bytes
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.transports.container import ROOT, memory_left
from samebit.weight_sync.wire.buckets import check_bucket_bytes

if sys.platform != "linux":
    raise ImportError(
        f"samebit.weight_sync runs on Linux, which alone has sealed memory files; this system is {sys.platform!r}: use "
        "a Linux machine, a virtual one or a container of Linux"
    )

NUM_BUCKETS = 2
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEAL_FUTURE_WRITE = 0x10


class SharedBuckets:
    """Maps the memory, which the sender may write and the receiver only read. `descriptor` is for reading."""

    def __init__(self, descriptor: int, mapped: mmap.mmap) -> None:
        self._array = np.frombuffer(mapped, np.uint8)
        self._closer = weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor

    @classmethod
    def create(cls, bucket_bytes: int, root: Path = ROOT) -> SharedBuckets:
        """Reserve and seal the memory. Raises `OSError` when there is no room. root: of the file system."""
        size = NUM_BUCKETS * bucket_bytes
        descriptor = os.memfd_create("samebit-buckets", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            _reserve(descriptor, size, _available(root))
            mapped = mmap.mmap(descriptor, size)
            _seal(descriptor)
            return cls(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC), mapped)
        finally:
            os.close(descriptor)

    @classmethod
    def attach(cls, descriptor: int) -> SharedBuckets:
        """Map the sender's memory and own its descriptor. Raises `SyncBrokenError` unless seals and size are right."""
        try:
            size = _checked_size(descriptor)
            return cls(descriptor, mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise SyncBrokenError(f"the open file of the sender is no sealed memory of two buckets: {error}") from error

    def bucket(self, number: int) -> Bytes:
        size = self._array.size // NUM_BUCKETS
        return self._array[number * size : (number + 1) * size]


def _reserve(descriptor: int, size: int, available: int) -> None:
    """Reserve the memory, after a look at what is available: the system kills a process when a memory file runs out."""
    try:
        if size > available:
            raise OSError(errno.ENOMEM, f"{available} bytes are available")
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise OSError(error.errno, f"no room for {size} bytes of shared memory: {error.strerror}") from error


def _available(root: Path) -> int:
    """Return the bytes that this machine, and a container, has left."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    container = memory_left(root)
    return machine if container is None else min(machine, container)


def _seal(descriptor: int) -> None:
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | _SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)  # before Linux 5.1


def _checked_size(descriptor: int) -> int:
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    if seals & _SEALS != _SEALS:
        raise ValueError(f"its seals are {seals:#x}, and {_SEALS:#x} are needed")
    size = os.fstat(descriptor).st_size
    if size % NUM_BUCKETS:
        raise ValueError(f"it has {size} bytes")
    check_bucket_bytes(size // NUM_BUCKETS)
    return size
