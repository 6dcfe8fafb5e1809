"""The shared memory can neither be cut off under a process nor written by the receiver."""

from __future__ import annotations

import fcntl
import mmap
import os
import runpy
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from samebit.weight_sync import SyncBrokenError
from samebit.weight_sync.transports import shared_buckets
from samebit.weight_sync.transports.shared_buckets import SharedBuckets
from samebit.weight_sync.transports.shared_memory import SharedFile

from ..patience import HANG
from .strangers import receiving_from_a_stranger

SIZE = 2048
ALL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed(seals: int, size: int = SIZE) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_neither_side_can_cut_it_off_or_write_but_the_sender_through_its_mapping() -> None:
    ours = SharedBuckets.create(SIZE // 2)
    theirs = SharedBuckets.attach(os.dup(ours.descriptor))
    assert fcntl.fcntl(theirs.descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    again = os.open(f"/proc/self/fd/{theirs.descriptor}", os.O_RDWR)  # what another process of this user could do
    for act in (
        lambda: os.ftruncate(again, 0),
        lambda: os.ftruncate(again, SIZE * 2),
        lambda: os.write(again, b"x"),
        lambda: mmap.mmap(again, SIZE),
        lambda: fcntl.fcntl(again, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(PermissionError):
            act()
    os.close(again)
    assert os.fstat(ours.descriptor).st_size == SIZE
    with pytest.raises(ValueError, match="read-only"):
        theirs.bucket(0)[0] = 1
    ours.bucket(1)[7] = 9
    assert theirs.bucket(1)[7] == 9


def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


FILES: dict[str, Callable[[], int]] = {
    "a pipe": pipe,
    "a folder": lambda: os.open("/", os.O_RDONLY),
    "a regular file": lambda: os.open(__file__, os.O_RDONLY),
    "a device": lambda: os.open("/dev/zero", os.O_RDONLY),
    "a socket": lambda: socket.socket(socket.AF_UNIX).detach(),
    "a memory file that can not be sealed": lambda: os.memfd_create("test"),
    "no seals": lambda: sealed(0),
    "may shrink": lambda: sealed(fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
    "may grow": lambda: sealed(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL),
    "empty": lambda: sealed(ALL, 0),
    "small": lambda: sealed(ALL, SIZE - 128),
    "odd": lambda: sealed(ALL, SIZE + 1),
    "not aligned": lambda: sealed(ALL, SIZE + 64),
}


@pytest.mark.parametrize("kind", FILES)
def test_another_open_file_is_refused(kind: str) -> None:
    model = nn.Linear(2, 2)
    with receiving_from_a_stranger(model) as (stranger, received):
        given = FILES[kind]()
        stranger.send(SharedFile(), given)
        with pytest.raises(SyncBrokenError, match="no sealed memory of two buckets"):
            received.result(HANG)
        os.close(given)


def test_a_message_without_the_open_file() -> None:
    with receiving_from_a_stranger(nn.Linear(2, 2)) as (stranger, received):
        stranger.send(SharedFile())
        with pytest.raises(SyncBrokenError, match="was to hand over an open file, and did not"):
            received.result(HANG)


def test_open_files_that_nobody_asked_for_are_closed() -> None:
    """Files that a stranger sends along, many with one message or one with each, are closed."""
    with receiving_from_a_stranger(nn.Linear(2, 2)) as (stranger, received):
        before = len(list(Path("/proc/self/fd").iterdir()))
        given = [pipe() for _ in range(20)]
        stranger.send(SharedFile(), stranger.memory.descriptor)
        socket.send_fds(stranger.raw, [b"\0\0\0\x14"], given)
        for one in given:
            socket.send_fds(stranger.raw, [b" "], [one])
            os.close(one)
        with pytest.raises(SyncBrokenError):
            received.result(HANG)
        assert len(list(Path("/proc/self/fd").iterdir())) < before + len(given) / 2


def test_memory_that_the_machine_has_not_is_refused() -> None:
    with pytest.raises(OSError, match=r"no room for \d+ bytes of shared memory: \d+ bytes are available"):
        SharedBuckets.create(1 << 50)


def test_another_system_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The `fcntl` of another system does not know the seals."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(fcntl, "F_SEAL_SHRINK")
    with pytest.raises(ImportError, match=r"samebit\.weight_sync runs on Linux, .*; this system is 'darwin'"):
        runpy.run_path(shared_buckets.__file__)
