"""Send a trainer's weights to `samebit serve` over gloo, through the client of vLLM or of TRL.

Invariants
----------
* Tensors are sent part by part, and never are more than `part_bytes` (or one tensor) copied at a time; the server
  writes them as one update, whole or not at all.
* What the server refuses raises in the caller at once, and ends the transfer: the next update needs a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from samebit.weight_sync import gloo_group, listening_store
from samebit.weight_sync.wire.link import DEFAULT_TIMEOUT

T = TypeVar("T")
Part = list[tuple[str, torch.Tensor]]


class UpdateClient(Protocol):
    """Lists what is asked of the server: vLLM's `HTTPVLLMWeightSyncClient` and TRL's `VLLMClient` have it."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self) -> None: ...


class GlooWeights:
    """Sends weights, from one process, to one server. One call at a time."""

    def __init__(
        self,
        client: UpdateClient,
        *,
        host: str = "127.0.0.1",
        timeout: float = DEFAULT_TIMEOUT,
        part_bytes: int = 1 << 28,
    ) -> None:
        """Keep what to call; nothing is asked of the server yet.

        Args:
            client: of the server's endpoints of control.
            host: this machine's address that the server reaches.
            timeout: seconds in which the server has to come, and each tensor to be taken.
            part_bytes: how much is sent with one call.
        """
        self._client = client
        self._host = host
        self._timeout = timeout
        self._part_bytes = part_bytes
        self._group: ProcessGroupGloo | None = None

    def init_weight_transfer(self) -> None:
        """Meet the server in a group of two."""
        store = listening_store(self._host)
        place = {"backend": "gloo", "master_address": self._host, "master_port": store.port}
        info = {**place, "rank_offset": 1, "world_size": 2, "timeout": self._timeout}
        self._group = _beside(
            lambda: gloo_group(store, 0, 2, timeout=self._timeout),
            lambda: self._client.init_weight_transfer_engine(info),
        )

    def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send tensors by their names; the server computes with them when this returns.

        Raises:
            RuntimeError: there is no transfer, or the group broke.
        """
        group, self._group = self._group, None
        if group is None:
            raise RuntimeError("there is no transfer: init_weight_transfer() comes before send_weights()")
        self._client.start_weight_update()
        for part in _parts(weights, self._part_bytes):
            self._send(group, part)
        self._client.finish_weight_update()
        self._group = group

    def _send(self, group: ProcessGroupGloo, part: Part) -> None:
        described = {
            "names": [name for name, _ in part],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
            "shapes": [list(tensor.shape) for _, tensor in part],
        }
        _beside(lambda: _broadcast(group, part), lambda: self._client.update_weights(described))

    def destroy(self) -> None:
        """Leave the group."""
        self._group = None


def _parts(weights: Iterable[tuple[str, torch.Tensor]], most: int) -> Iterator[Part]:
    part: Part = []
    size = 0
    for name, tensor in weights:
        if part and size + tensor.nbytes > most:
            yield part
            part, size = [], 0
        part.append((name, tensor.detach().cpu().contiguous()))
        size += tensor.nbytes
    if part:
        yield part


def _broadcast(group: Any, part: Part) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    for _, tensor in part:
        group.broadcast([tensor], options).wait()


def _beside(work: Callable[[], T], call: Callable[[], None]) -> T:
    """Return what `work` gives, in a thread beside the call that has the server take part in it.

    An error of the call is raised without waiting for the thread, which its own timeout ends.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    call()
    return done.result()
