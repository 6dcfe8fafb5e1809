"""Measure how fast weights get into a worker: each way beside a copy of the same bytes, and the cost of a sleep.

    python benchmarks/weight_sync.py [--megabytes 1024] [--rounds 7] [--json FILE]

All updates go through `RolloutWorker.receive_weights`, and every one brings other values than the one before.
README.md says what the figures are.
"""

import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
from torch import distributed as dist
from torch import nn

from samebit.benchmarks.contestants.weight_sender import (
    BUCKETS,
    Peer,
    broadcast_each,
    build,
    change,
    flat_bytes,
    peak,
    reset_peak,
)
from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import (
    Calibration,
    Round,
    Spread,
    alternate,
    is_steady,
    kept,
    ratio,
    spread,
)
from samebit.benchmarks.workloads.weight_changes import delta_shares
from samebit.rollout import RolloutConfig, RolloutWorker
from samebit.weight_sync import BroadcastReceiver, SharedMemoryReceiver, SyncReport, WeightStream

CONFIG = RolloutConfig(max_num_seqs=4, max_model_len=64)
REFERENCES = {
    "memcpy": "one memmove a tensor, one thread",
    "broadcast": "one bare dist.broadcast a tensor, the same tensors",
    "flat_broadcast": "one bare dist.broadcast of one tensor with as many bytes",
}


class Trainer:
    """Holds the model in this process that is synced from, and a spare copy of it that memcpy writes to."""

    def __init__(self, megabytes: int) -> None:
        self.model = build(megabytes)
        self.spare = [torch.zeros_like(parameter) for parameter in self.model.parameters()]

    def memcpy(self, number: int) -> float:
        """Copy all weights by bare memmove, tensor by tensor."""
        pairs = [(s.data_ptr(), p.data_ptr(), p.nbytes) for s, p in zip(self.spare, self._parameters(), strict=True)]
        began = time.perf_counter()
        for target, source, size in pairs:
            ctypes.memmove(target, source, size)
        return time.perf_counter() - began

    def _parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


class Contest:
    """Runs the contestants. Each turn checks that all weights have changed."""

    def __init__(self, trainer: Trainer, worker: RolloutWorker, peer: Peer) -> None:
        self.trainer = trainer
        self.worker = worker
        self.peer = peer
        self.shm = SharedMemoryReceiver(peer.addresses["shm"])
        self.gloo = BroadcastReceiver(0)
        self._flat = flat_bytes(trainer.model)

    def turns(self) -> dict[str, Callable[[int], float]]:
        return {
            "memcpy": self.trainer.memcpy,
            "same_process": lambda _: self._local(WeightStream.of(self.trainer.model)),
            "same_process_verified": lambda _: self._local(WeightStream.of(self.trainer.model), verify=True),
            "same_process_checked_first": lambda _: self._local(self.trainer.model),
            "shm": lambda _: self._remote("shm", self.shm),
            "shm_verified": lambda _: self._remote("shm", self.shm, verify=True),
            "broadcast": lambda _: self._bare("broadcast", lambda: broadcast_each(self.trainer.spare)),
            "flat_broadcast": lambda _: self._bare("flat_broadcast", lambda: dist.broadcast(self._flat, 0)),
            "gloo": lambda _: self._remote("gloo", self.gloo),
        }

    def _local(self, source: object, verify: bool = False) -> float:
        change(self.trainer.model)
        began = time.perf_counter()
        report = self.worker.receive_weights(source, verify=verify)
        seconds = time.perf_counter() - began
        _check(report)
        return seconds

    def _remote(self, way: str, source: object, verify: bool = False) -> float:
        self.peer.tell("next")
        self.peer.answer()
        began = time.perf_counter()
        self.peer.tell(way)
        report = self.worker.receive_weights(source, verify=verify)
        seconds = time.perf_counter() - began
        if self.peer.answer().digest != report.digest:
            raise RuntimeError("what arrived is not what was sent")
        _check(report)
        return seconds

    def _bare(self, command: str, take_part: Callable[[], object]) -> float:
        began = time.perf_counter()
        self.peer.tell(command)
        take_part()
        seconds = time.perf_counter() - began
        self.peer.answer()
        return seconds


def _check(report: SyncReport) -> None:
    if report.changed_tensors != report.tensors:
        raise RuntimeError(f"only {report.changed_tensors} of {report.tensors} tensors changed")


def delta_share(contest: Contest) -> float:
    """Return the bytes of a delta of one element in a hundred over those of a full update."""
    contest.peer.tell("shm", {"delta": True})
    contest.worker.receive_weights(contest.shm)
    contest.peer.answer()
    contest.peer.tell("delta")
    report = contest.worker.receive_weights(contest.shm, verify=True)
    if not contest.peer.answer().delta:
        raise RuntimeError("it went as a full update")
    return report.sent_bytes / report.dense_bytes


def peak_buckets(contest: Contest) -> dict[str, list[float]]:
    """Return the largest growth of either process's memory in its first update over a new link, in buckets."""
    ends = {"shm": SharedMemoryReceiver(contest.peer.addresses["memory"]), "gloo": BroadcastReceiver(0)}
    shares = {way: _peak(contest, end, way) for way, end in ends.items()}
    most = max(*shares.values(), _peak(contest, WeightStream.of(contest.trainer.model)))
    return {
        "peak_extra_buckets": [most],
        **{f"peak_extra_buckets_{way}": [share] for way, share in shares.items()},
    }


def _peak(contest: Contest, source: object, way: str | None = None) -> float:
    """Measure the peak of one way; `way` is what the other process sends over, if it sends."""
    before = reset_peak()
    if way is not None:
        contest.peer.tell("peak", way)
    contest.worker.receive_weights(source)
    grown = peak() - before
    return max(grown, 0 if way is None else contest.peer.answer()) / BUCKETS["memory"]


def sleep_and_wake(worker: RolloutWorker, trainer: Trainer) -> float:
    """Return the milliseconds to release all memory without keeping a copy, and to take it again."""
    began = time.perf_counter()
    worker.sleep(level=2)
    worker.wake_up()
    milliseconds = 1e3 * (time.perf_counter() - began)
    worker.receive_weights(trainer.model)
    return milliseconds


def same_module(trainer: Trainer) -> list[float]:
    """Return the milliseconds of an update of a worker that runs on the trainer's own module."""
    with RolloutWorker(trainer.model, config=CONFIG) as worker:
        seconds = []
        for _ in range(10):
            change(trainer.model)
            began = time.perf_counter()
            _check(worker.receive_weights())
            seconds.append(time.perf_counter() - began)
    return [1e3 * second for second in seconds]


def delta_curve(steps: int, warmup: int, folder: Path) -> dict[str, Spread]:
    """Return shares of real GRPO steps, by learning rate: all bytes of the steps, and the extremes of a step."""
    named = {
        f"delta_bytes_over_dense_lr{rate:.0e}": shares for rate, shares in delta_shares(steps, warmup, folder).items()
    }
    figures = {name: Spread(fmean(shares), min(shares), max(shares)) for name, shares in named.items()}
    return {"delta_bytes_over_dense": figures["delta_bytes_over_dense_lr1e-05"], **figures}


def measure(megabytes: int, rounds: int, steps: int, warmup: int) -> tuple[dict[str, Spread], dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="samebit-bench-") as folder:
        deltas = delta_curve(steps, warmup, Path(folder))
    trainer = Trainer(megabytes)
    with tempfile.TemporaryDirectory(prefix="samebit-bench-") as folder:
        store = Path(folder) / "store"
        peer = Peer(megabytes, store)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
        trainer.model.save_pretrained(folder)
        with RolloutWorker(folder, config=CONFIG) as worker:
            peer.connect()
            contest = Contest(trainer, worker, peer)
            calibration = Calibration()
            alternate(contest.turns(), 1, calibration)  # compiles and touches all memory
            measured = alternate(contest.turns(), rounds, calibration, peer.own_seconds)
            others = {
                "delta_bytes_over_dense_one_percent": [delta_share(contest)],
                **peak_buckets(contest),
                "sleep_wake_ms": [sleep_and_wake(worker, trainer) for _ in range(rounds)],
                "same_module_ms": same_module(trainer),
            }
        peer.close()
    dist.destroy_process_group()
    good = kept(measured, calibration)
    gigabytes = flat_bytes(trainer.model).numel() / 1e9
    metrics = {**_speeds(good, gigabytes), **{name: spread(values) for name, values in others.items()}, **deltas}
    disturbed = sum(not is_steady(one, calibration) for one in measured)
    return metrics, {
        "gigabytes": gigabytes,
        "rounds": rounds,
        "grpo_steps": steps,
        "disturbed_rounds": disturbed,
        "buckets": BUCKETS,
        "references": REFERENCES,
    }


def _speeds(rounds: list[Round], gigabytes: float) -> dict[str, Spread]:
    """Return shares of the reference's speed, and gigabytes a second of each contestant."""
    names = list(rounds[0].seconds)
    copies = [name for name in names if name.startswith(("same_process", "shm"))]
    pairs = [(name, "memcpy") for name in copies] + [("gloo", "broadcast"), ("gloo", "flat_broadcast")]
    shares = {f"{name}_over_{reference}": ratio(rounds, reference, name) for name, reference in pairs}
    speeds = {name: spread([gigabytes / one.seconds[name] for one in rounds]) for name in names}
    return shares | {f"gigabytes_per_second_{name}": speed for name, speed in speeds.items()}


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=7, of="each transport")
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the weights")
    parser.add_argument("--steps", type=int, default=50, help="GRPO steps of each point of the delta curve")
    parser.add_argument("--warmup", type=int, default=500, help="most supervised steps before them")
    args = parser.parse_args()
    metrics, meta = measure(args.megabytes, args.rounds, args.steps, args.warmup)
    table.show(metrics)
    if args.json:
        results_file.write(args.json, results_file.describe(**meta), metrics)


if __name__ == "__main__":
    main()
