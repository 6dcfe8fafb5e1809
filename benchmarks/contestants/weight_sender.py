"""Run the trainer's process of the weight sync benchmark, which sends when it is told to."""

import multiprocessing
import os
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from samebit.weight_sync import BroadcastSender, SharedMemorySender
from samebit.weight_sync.transports.broadcast import BROADCAST_BUCKET
from samebit.weight_sync.wire.link import DEFAULT_BUCKET

BUCKETS = {"shm": DEFAULT_BUCKET, "gloo": BROADCAST_BUCKET, "memory": 64 << 20}
DELTA_SHARE = 0.01
_ROW = 1024 * 2
_LAYER = 25_176_000


def build(megabytes: int) -> Qwen3ForCausalLM:
    """Build a bfloat16 Qwen3 of about this size."""
    torch.manual_seed(0)
    size = megabytes * 2**20
    vocabulary = min(32000, size // (2 * _ROW))
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        num_hidden_layers=max(1, round((size - vocabulary * _ROW) / _LAYER)),
        tie_word_embeddings=True,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


@torch.no_grad()
def change(model: torch.nn.Module, factor: float = -1) -> None:
    """Change every weight."""
    for parameter in model.parameters():
        parameter.mul_(factor)


@torch.no_grad()
def change_some(model: torch.nn.Module) -> None:
    """Change a share of the elements, spread evenly."""
    for parameter in model.parameters():
        parameter.view(-1)[:: round(1 / DELTA_SHARE)] *= 2


@torch.no_grad()
def broadcast_each(tensors: Iterable[torch.Tensor]) -> None:
    """Send as a trainer would without samebit: from rank 0, one bare broadcast a tensor."""
    for tensor in tensors:
        dist.broadcast(tensor, 0)


def flat_bytes(model: torch.nn.Module) -> torch.Tensor:
    """Return a buffer as large as the model, and written to: zeros that are only read are one page of memory."""
    return torch.ones(sum(p.numel() * p.element_size() for p in model.parameters()), dtype=torch.uint8)


def reset_peak() -> int:
    """Return the bytes in memory now, and count the peak from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


class Peer:
    """Drives the process, as its user sees it."""

    def __init__(self, megabytes: int, store: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._commands, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, megabytes, str(store)), daemon=True)
        self._process.start()
        theirs.close()
        self.addresses: dict[str, str] = {}

    def connect(self) -> None:
        """Wait until it listens."""
        self.addresses = self._commands.recv()

    def tell(self, command: str, *args: object) -> None:
        self._commands.send((command, *args))

    def answer(self) -> Any:
        return self._commands.recv()

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")

    def own_seconds(self) -> float:
        """Return the CPU time of both processes."""
        return time.process_time() + self.cpu_seconds()

    def close(self) -> None:
        self.tell("stop")
        self._process.join(60)


def _run(commands: Connection, megabytes: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
    model = build(megabytes)
    change(model, 2)  # no value that the trainer in the other process ever has
    flat = flat_bytes(model)
    memory = SharedMemorySender(bucket_bytes=BUCKETS["memory"])
    shm = SharedMemorySender(bucket_bytes=BUCKETS["shm"])
    gloo = BroadcastSender(bucket_bytes=BUCKETS["gloo"])
    commands.send({"shm": shm.address, "memory": memory.address})
    while True:
        command, *args = commands.recv()
        if command == "stop":
            return
        if command == "broadcast":
            broadcast_each(model.parameters())
            commands.send(None)
        elif command == "flat_broadcast":
            dist.broadcast(flat, 0)
            commands.send(None)
        elif command == "next":
            change(model)
            commands.send(None)
        elif command == "peak":
            before = reset_peak()
            with memory if args == ["shm"] else BroadcastSender(bucket_bytes=BUCKETS["memory"]) as sender:
                sender.send(model)
                commands.send(peak() - before)
        elif command == "delta":
            change_some(model)
            commands.send(shm.send(model, delta=True))
        else:
            commands.send({"shm": shm, "gloo": gloo}[command].send(model, **(args[0] if args else {})))


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")
