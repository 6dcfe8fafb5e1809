"""Take weights as the clients of vLLM bring them: over a transfer that was agreed on, or from a folder.

Invariants
----------
* What comes between start and finish is one update: it is kept aside, checked whole, and written whole or not at all.
* No peer's bytes are unpickled, and no code comes over HTTP.
* Weights are taken in the dtype that is served, whatever dtype they come in; the log says from which to which, once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroup

from samebit.rollout.async_worker import AsyncWorker
from samebit.rollout.fleet.fleet import Fleet
from samebit.rollout.integrations.http.errors import ApiError
from samebit.rollout.integrations.http.metrics.requests import RequestMetrics
from samebit.rollout.integrations.http.rl.folders import below
from samebit.rollout.integrations.http.rl.requests import GlooInit, SharedMemoryInit, UpdateInfo
from samebit.rollout.integrations.http.versions import Versions
from samebit.weight_sync import SyncReport, connected_store, gloo_group
from samebit.weight_sync.transports.addresses import SharedMemoryAt

logger = logging.getLogger(__name__)
DTYPES = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "bool")
}
MOST_BYTES = 1 << 44


class WeightTransfer:
    """Holds the transfer that was agreed on, and what has come over it. One call at a time."""

    def __init__(self, worker: AsyncWorker, root: str | None, versions: Versions, metrics: RequestMetrics) -> None:
        self._worker = worker
        self._root = root
        self._versions = versions
        self._metrics = metrics
        self._turn = asyncio.Lock()
        self._group: ProcessGroup | None = None
        self._link: SharedMemoryAt | None = None
        self._parts: dict[str, torch.Tensor] | None = None
        self._told: set[str] = set()

    async def init(self, info: GlooInit | SharedMemoryInit) -> None:
        """Agree on a transfer; one that there was is given up."""
        async with self._turn:
            await self._give_up()
            if isinstance(info, SharedMemoryInit):
                if isinstance(self._worker.worker, Fleet):
                    raise ApiError(400, "shared memory reaches one process, and a fleet has several: use gloo")
                self._link = SharedMemoryAt(info.address, info.timeout)
            else:
                self._group = await self._worker.in_thread(lambda: _joined(info))

    async def shut_down(self) -> None:
        """Give up the transfer."""
        async with self._turn:
            await self._give_up()

    async def _give_up(self) -> None:
        """Hang up: a sender that still heard this end would wait for it, whoever is to receive next."""
        link = self._link
        self._group = self._link = self._parts = None
        if link is not None:
            await self._worker.hang_up(link)

    async def start(self) -> None:
        """Begin an update of several parts."""
        async with self._turn:
            if self._parts is not None:
                raise ApiError(409, "an update has been started already; finish it first")
            if self._group is None and self._link is None:
                raise ApiError(409, "there is no transfer; call /init_weight_transfer_engine first")
            self._parts = {}

    async def update(self, info: UpdateInfo) -> None:
        """Take tensors over the transfer: a part of the update that was started, or an update of its own."""
        async with self._turn:
            if self._link is not None:
                if info.names:
                    raise ApiError(400, "the sender in shared memory names its tensors itself: leave names empty")
                await self._receive(self._link)
                return
            if self._group is None:
                raise ApiError(409, "there is no transfer; call /init_weight_transfer_engine first")
            empty, group = _empty_tensors(info), self._group
            tensors = await self._worker.in_thread(lambda: _broadcast(group, empty))
            if self._parts is None:
                await self._receive(tensors)
                return
            twice = next((name for name in tensors if name in self._parts), None)
            if twice is not None:
                raise ApiError(409, f"{twice} came twice in one update")
            self._parts.update(tensors)

    async def finish(self, name: str | None) -> None:
        """Write the parts that have come; `name` is that of the new weights."""
        async with self._turn:
            if self._parts is None:
                raise ApiError(409, "no update has been started")
            parts, self._parts = self._parts, None
            if parts:
                await self._receive(parts)
            if name is not None:
                self._versions.give(self._worker.worker.weight_version, name)

    async def from_folder(self, folder: str) -> None:
        """Take the weights of a folder of safetensors below the root."""
        path = below(self._root, folder, "weight_dir")
        async with self._turn:
            await self._receive(str(path))

    async def _receive(self, source: object) -> None:
        began = time.monotonic()
        if isinstance(source, dict):
            worker = self._worker.worker
            report = await self._worker.in_thread(lambda: worker.receive_weights(source, cast=True))
        else:
            report = await self._worker.receive_weights(source, cast=True)
        self._metrics.syncs.add(time.monotonic() - began, _moved(report))
        self._tell_casts(report.casts)

    def _tell_casts(self, casts: tuple[str, ...]) -> None:
        """Log what this update has cast, unless an earlier one has cast from and to the same dtypes."""
        by_dtypes: dict[str, list[str]] = {}
        for cast in casts:
            name, _, dtypes = cast.rpartition(": ")
            by_dtypes.setdefault(dtypes, []).append(name)
        for dtypes, names in by_dtypes.items():
            if dtypes not in self._told:
                self._told.add(dtypes)
                logger.warning(
                    "%d tensors of an update were cast, %s, %s among them: the log-probabilities are those of a "
                    "trainer, bit for bit, only if it computes in the dtype that is served",
                    len(names), dtypes, names[0],
                )  # fmt: skip


def _moved(report: SyncReport) -> int:
    return report.sent_bytes or report.bytes or 0


def _joined(info: GlooInit) -> Any:
    if info.rank_offset >= info.world_size:
        raise ApiError(400, f"rank_offset must be below world_size ({info.world_size}), got {info.rank_offset}")
    store = connected_store(info.master_address, info.master_port, timeout=info.timeout)
    return gloo_group(store, info.rank_offset, info.world_size, timeout=info.timeout)


def _empty_tensors(info: UpdateInfo) -> dict[str, torch.Tensor]:
    """Return room for the tensors that are named. Raises `ApiError` for a name, dtype or shape that can not be."""
    if not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise ApiError(400, "names, dtype_names and shapes must be of one length", param="update_info")
    if not info.names or len(set(info.names)) < len(info.names):
        raise ApiError(400, "names must name each tensor once", param="update_info.names")
    found: dict[str, torch.Tensor] = {}
    size = 0
    for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
        kind = DTYPES.get(dtype.removeprefix("torch."))
        if kind is None:
            raise ApiError(400, f"{name} has the dtype {dtype!r}; allowed: {', '.join(DTYPES)}", param="update_info")
        size += torch.Size(shape).numel() * kind.itemsize
        if size > MOST_BYTES:
            raise ApiError(400, "the update is larger than any memory", param="update_info.shapes")
        try:
            found[name] = torch.empty(shape, dtype=kind, device="cpu")
        except RuntimeError as error:
            raise ApiError(400, f"there is no memory for {name}", param="update_info.shapes") from error
    return found


def _broadcast(group: ProcessGroup, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fill the tensors, in their order, with what rank 0 sends."""
    options = BroadcastOptions()
    options.rootRank = 0
    try:
        for tensor in tensors.values():
            group.broadcast([tensor], options).wait()
    except RuntimeError as error:
        raise ApiError(502, f"the transfer broke off: {str(error).splitlines()[0]}") from error
    return tensors
