"""Forks processes that kill themselves (SIGKILL) in the middle of a sync; run by test_worker_killed.py.

Each line on stdin is JSON: `role` ("sender", "delta sender", "gloo sender" or "receiver"), `address` (of a sender for
a receiver, of a store for gloo), `calls`: at which call of a function of samebit.weight_sync to die, or null to live
and print how many there were. (One that should have died and made fewer calls says nothing.) A sender over shared
memory first says where it is. A delta sender sends all weights, changes some, and dies while it sends the changes.
A receiver counts from the announcement on: a sender that a receiver leaves before that waits for the next one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from samebit.weight_sync import (
    BroadcastSender,
    SharedMemoryReceiver,
    SharedMemorySender,
    apply_weights,
    gloo_group,
)
from samebit.weight_sync.wire.link import Announcement

BUCKET = 4096
TIMEOUT = 1800


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(100, 129), nn.Linear(129, 33), nn.Embedding(7, 1000))


class Counter:
    """Counts calls into the package, and kills the process at one of them."""

    def __init__(self, last: int | None) -> None:
        self.last = last
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "weight_sync" in frame.f_code.co_filename:
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def live(task: dict[str, Any]) -> None:
    counter = Counter(task["calls"])
    weights = model()
    if task["role"] in ("sender", "delta sender"):
        sender: Any = SharedMemorySender(bucket_bytes=BUCKET, timeout=TIMEOUT)
        say(sender.address)
    elif task["role"] == "gloo sender":
        store = dist.FileStore(task["address"], 2)  # a TCPStore hangs in a fork
        sender = BroadcastSender(gloo_group(store, 0, 2, timeout=TIMEOUT), bucket_bytes=BUCKET, timeout=TIMEOUT)
    else:
        end = SharedMemoryReceiver(task["address"], timeout=TIMEOUT)
        listen = end.listen

        def listen_and_count(most_bytes: int) -> Announcement:
            announcement = listen(most_bytes)
            sys.setprofile(counter)
            return announcement

        end.listen = listen_and_count
        apply_weights(weights, end)
    delta = task["role"] == "delta sender"
    if delta:
        sender.send(weights, delta=True)
        with torch.no_grad():
            weights[0].weight[::3] *= 2
    if task["role"] != "receiver":
        sys.setprofile(counter)
        sender.send(weights, delta=delta)
    sys.setprofile(None)
    if counter.last is None:
        say(str(counter.count))


def main() -> None:
    torch.set_num_threads(1)
    with SharedMemorySender(bucket_bytes=BUCKET) as sender, ThreadPoolExecutor(1) as other:
        warm = other.submit(sender.send, model())  # the kernels are loaded once, not in every fork
        with SharedMemoryReceiver(sender.address) as end:
            apply_weights(model(), end)
        warm.result()
    say("ready")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            live(json.loads(line))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
