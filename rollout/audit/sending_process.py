"""Send weights from the other process of `samebit check`: from a file, first over shared memory, then by broadcast."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn

from samebit.weight_sync import BroadcastReceiver, BroadcastSender, SharedMemorySender, WeightStream, open_source
from samebit.weight_sync.closing import Closing
from samebit.weight_sync.manifest import live_tensors

TIMEOUT = 300.0


class SendingProcess(Closing):
    """Runs another process, started with the weights of `model`. The two transports are used once each, in this
    order."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        tensors = {name: tensor.detach().clone() for name, tensor in live_tensors(model).items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "sent.safetensors")
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "samebit.rollout.audit.sending_process", str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,  # the first place where -m looks for packages
        )

    def address(self) -> str:
        """Return the address of its shared memory link.

        Raises:
            ValueError: the process ended before.
        """
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise ValueError("the process that was to send weights ended: see its error above")
        return line.strip()

    @contextmanager
    def broadcast(self) -> Iterator[BroadcastReceiver]:
        """Return this process's end of the broadcast.

        Raises:
            ValueError: this process is a rank of another group already.
        """
        if dist.is_initialized():
            raise ValueError("the broadcast can not be checked in a process that is in a torch.distributed group")
        _join(self._folder, rank=1)
        try:
            with BroadcastReceiver(0, timeout=TIMEOUT) as end:
                yield end
        finally:
            dist.destroy_process_group()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _join(folder: Path, rank: int) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", store, timedelta(seconds=TIMEOUT), rank=rank, world_size=2)


def _send_all(folder: Path) -> None:
    torch.set_num_threads(1)
    with open_source(folder) as source:

        def stream() -> WeightStream:
            specs = source.specs()
            return WeightStream(specs, ((name, source.load(name)) for name in specs))

        with closing(SharedMemorySender(timeout=TIMEOUT)) as sender:
            sys.stdout.write(sender.address + "\n")
            sys.stdout.flush()
            sender.send(stream())
        _join(folder, rank=0)
        with BroadcastSender(timeout=TIMEOUT) as to_all:
            to_all.send(stream())
        dist.destroy_process_group()


if __name__ == "__main__":
    _send_all(Path(sys.argv[1]))
