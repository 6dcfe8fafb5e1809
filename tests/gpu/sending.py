"""Send weights over CUDA IPC, in a process of its own: each sync other ones. Prints its address, then each digest.

python sending.py SYNCS [BUCKETS]: killed when it has sent so many buckets.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

from samebit.weight_sync import CudaIpcSender

BUCKET = 1 << 16
TIMEOUT = 300.0


class Model(nn.Module):
    """Holds a tensor larger than a bucket, an empty one, a transposed one, a tie, an integer buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(1000, 129, dtype=torch.bfloat16)
        self.head = nn.Linear(129, 1000, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.none = nn.Parameter(torch.randn(0, 3))
        self.turned = nn.Parameter(torch.randn(33, 65).t())
        self.register_buffer("steps", torch.arange(3))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def send(syncs: int, die_after: int | None) -> None:
    with CudaIpcSender(bucket_bytes=BUCKET, timeout=TIMEOUT) as sender:
        say(sender.address)
        if die_after is not None:
            real, count = sender.link.send_bucket, iter(range(1000))
            sender.link.send_bucket = (  # type: ignore[method-assign]
                lambda header: real(header) if next(count) < die_after else os.kill(os.getpid(), signal.SIGKILL)
            )
        for seed in range(syncs):
            say(sender.send(Model(seed).cuda()).digest)


if __name__ == "__main__":
    send(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
