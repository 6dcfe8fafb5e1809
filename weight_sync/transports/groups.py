"""Make the groups over which weights are broadcast: of processes that need not be of one `torch.distributed` world."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from typing import TypeAlias

from torch import distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.wire.link import DEFAULT_TIMEOUT, PeerLostError, SyncTimeoutError
from samebit.weight_sync.wire.patience import check_timeout

Group: TypeAlias = "dist.ProcessGroup | dist.ProcessGroupGloo | dist.ProcessGroupNCCL"

_CAME, _ALL_CAME = "samebit/came", "samebit/all_came"


def listening_store(host: str, port: int = 0) -> TCPStore:
    """Return a store at which the ranks of a new group meet, on this address only; `port` 0 takes any free one.

    As torch's own does, it listens where another has just ended.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connected_store(host: str, port: int, *, timeout: float = DEFAULT_TIMEOUT) -> TCPStore:
    """Connect to the `listening_store` of another process. Raises `PeerLostError` if none listens in time."""
    try:
        return TCPStore(host, port, timeout=timedelta(seconds=check_timeout(timeout)))
    except RuntimeError as error:
        raise PeerLostError(f"no sender at {host}:{port}: {str(error).splitlines()[0]}") from error


def gloo_group(store: Store, rank: int, size: int, *, timeout: float = DEFAULT_TIMEOUT) -> dist.ProcessGroupGloo:
    """Return a group of processes, once all have come; they need not be of one `torch.distributed` world.

    Raises:
        SyncTimeoutError: not all of them came within the timeout.
        PeerLostError: the store, or a rank that had come, went away.
    """
    limit = timedelta(seconds=check_timeout(timeout))
    _check_rank(rank, size)
    try:
        store.add(_CAME, 1)
        return dist.ProcessGroupGloo(store, rank, size, timeout=limit)
    except RuntimeError as error:
        raise _not_joined(store, size, timeout, error) from error


def nccl_group(store: Store, rank: int, size: int, *, timeout: float = DEFAULT_TIMEOUT) -> dist.ProcessGroupNCCL:
    """Return a group like a `gloo_group`, of GPUs, one a rank: each end names its own as ``device``.

    Raises:
        ValueError: this torch has no NCCL.
        SyncTimeoutError, PeerLostError: as for a `gloo_group`.
    """
    limit = timedelta(seconds=check_timeout(timeout))
    _check_rank(rank, size)
    if not dist.is_nccl_available():
        raise ValueError("this torch has no NCCL: use a gloo_group")
    try:
        if store.add(_CAME, 1) == size:
            store.set(_ALL_CAME, "")
        store.wait([_ALL_CAME], limit)  # the first collective would wait, for as long as NCCL likes
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)
    except RuntimeError as error:
        raise _not_joined(store, size, timeout, error) from error


def _not_joined(store: Store, size: int, timeout: float, error: RuntimeError) -> SyncBrokenError:
    """Return the error that says why the group was not made: not all ranks came, or torch's own reason."""
    with suppress(RuntimeError):
        if isinstance(error, dist.DistStoreError):  # the wait for the other ranks took too long
            came = store.add(_CAME, 0)
            return SyncTimeoutError(f"{came} of {size} ranks of the group came within {timeout:g} seconds")
    return PeerLostError(f"the group could not be made: {str(error).splitlines()[0]}")


def ranks_of(group: Group) -> list[int]:
    """Return the global rank of each rank of the group; in a group of no world, its own ranks."""
    if isinstance(group, dist.ProcessGroup):
        return dist.get_process_group_ranks(group)
    return list(range(group.size()))


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to {size - 1}, in a group of {size}, got {rank}")
