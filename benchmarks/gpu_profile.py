"""Show where the time of a step goes on a GPU: each Triton kernel of a decode and of a prefill by name.

Triton tells of each launch, and an event of CUDA before and after it says how long it ran: that needs no profiler of
the driver's, which some machines do not let a user have. Kernels are launched one by one, as graphs replay them. Each
step begins with a spin, in which the host launches what follows, so that few kernels wait for it. What is torch's own
(sums of drawn tokens, copies) is not listed.

Beside the kernels that stream memory stands what they read at least, over the bandwidth of a copy.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import nn
from transformers import PreTrainedModel

from samebit.benchmarks import gpu_figures as measure
from samebit.benchmarks.gpu_figures import Figure, Sizes
from samebit.rollout import RolloutWorker

SHOWN = 16
"""Counts the kernels of a profile that are shown: those that take longest."""

_SPARED = 0.05
"""The share of launches that may have no time of the GPU's, as it waited for all of their kernel."""

_SPIN = 200_000_000
"""Cycles of the GPU before a step, some 100 ms: longer than the host takes to launch one."""


@dataclass(frozen=True)
class Kernel:
    """Says how often a kernel ran, and for how many microseconds in all; None where the GPU waited for each launch."""

    name: str
    count: int
    microseconds: float | None


@dataclass(frozen=True)
class _Launch:
    """Holds the events around a launch; ``late``: the GPU had come to the first when the second was recorded."""

    name: str
    began: torch.cuda.Event
    ended: torch.cuda.Event
    late: bool


class LaunchTimes:
    """Notes when each kernel of Triton's begins and ends on the GPU, while it is open."""

    def __init__(self) -> None:
        self._began: torch.cuda.Event | None = None
        self._launches: list[_Launch] = []

    def __enter__(self) -> LaunchTimes:
        triton.knobs.runtime.launch_enter_hook.add(self._before)
        triton.knobs.runtime.launch_exit_hook.add(self._after)
        return self

    def __exit__(self, *_: object) -> None:
        triton.knobs.runtime.launch_enter_hook.remove(self._before)
        triton.knobs.runtime.launch_exit_hook.remove(self._after)

    def kernels(self) -> list[Kernel]:
        """Return what ran, the longest first. A launch that the GPU waited for counts as long as the others of its
        kernel take, since its own time is the host's.

        Raises:
            RuntimeError: nothing ran.
        """
        if not self._launches:
            raise RuntimeError("no kernel of Triton's was launched: the model is not on a GPU")
        self._launches[-1].ended.synchronize()
        by_name: dict[str, list[_Launch]] = defaultdict(list)
        for launch in self._launches:
            by_name[launch.name].append(launch)
        found = [Kernel(name, len(each), _time_of_all(each)) for name, each in by_name.items()]
        return sorted(found, key=lambda kernel: -(kernel.microseconds or 0.0))

    def _before(self, launch: Any) -> None:
        self._began = _recorded()

    def _after(self, launch: Any) -> None:
        if self._began is not None:
            self._launches.append(_Launch(launch.get()["name"], self._began, _recorded(), late=self._began.query()))


def profiles(model: PreTrainedModel, sizes: Sizes, device: str) -> Iterator[Figure]:
    """List the kernels of a decode step of many sequences, then those of a prefill.

    Raises:
        RuntimeError: the model is not on a GPU; or, after the list, the GPU waited for kernels at each launch.
    """
    count, copied = min(64, max(sizes.sequences)), measure.bandwidth(device)
    prompts, others = (measure.prompts_of(model, (length,) * count) for length in (sizes.prompt, sizes.prompt - 1))
    held = count * (sizes.prompt + sizes.new_tokens // 2) * measure.kv_bytes(model)
    least = {"_multiply": measure.weight_bytes(model) / copied * 1e6, "_attend_items": held / copied * 1e6}
    eager = {"enforce_eager": True, "async_scheduling": False}
    with measure.worker_of(model, sizes, count, device, **eager) as worker:
        worker.generate(prompts, measure.sampled(2))  # compiles, and fills the prefix cache
        decode = _kernels(worker, prompts, 1 + sizes.new_tokens)
        prefill = _kernels(worker, others, 1)
    yield from _figures(f"decode step of {count}", decode, 1 + sizes.new_tokens)
    for name, microseconds in least.items():
        yield Figure(f"decode step of {count}: {name}* at least", microseconds, "us")
    yield from _figures(f"prefill of {count} x {len(others[0])}", prefill, 1)
    check_times(decode)
    check_times(prefill)


def _kernels(worker: RolloutWorker, prompts: list[list[int]], new_tokens: int) -> list[Kernel]:
    with _spinning_before_steps(worker.module), LaunchTimes() as times:
        worker.generate(prompts, measure.sampled(new_tokens))
        return times.kernels()


def check_times(kernels: Sequence[Kernel]) -> None:
    """Check that nearly all launches have a time of the GPU's.

    Raises:
        RuntimeError: more than a twentieth have none.
    """
    untimed = [kernel for kernel in kernels if kernel.microseconds is None]
    if sum(kernel.count for kernel in untimed) > _SPARED * sum(kernel.count for kernel in kernels):
        names = ", ".join(f"{kernel.count} of {kernel.name}" for kernel in untimed)
        raise RuntimeError(f"the GPU waited for each launch of these, whose times are the host's: {names}")


@contextmanager
def _spinning_before_steps(module: Any) -> Iterator[None]:
    """Keep the GPU busy at the beginning of each step; the embedding is the first module that computes."""
    first: nn.Module = module.get_input_embeddings()
    hook = first.register_forward_pre_hook(lambda *_: torch.cuda._sleep(_SPIN) if torch.cuda.is_available() else None)
    try:
        yield
    finally:
        hook.remove()


def _time_of_all(launches: Sequence[_Launch]) -> float | None:
    """Return the microseconds of all launches by those that the GPU did not wait for; None if there is none."""
    times = [1e3 * launch.began.elapsed_time(launch.ended) for launch in launches if not launch.late]
    return len(launches) * statistics.mean(times) if times else None


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _figures(what: str, kernels: list[Kernel], steps: int) -> Iterator[Figure]:
    timed = [(kernel, kernel.microseconds) for kernel in kernels if kernel.microseconds is not None]
    yield Figure(f"{what}: all kernels with a time", sum(time for _, time in timed) / steps, "us")
    yield Figure(f"{what}: launches of these", sum(kernel.count for kernel, _ in timed) / steps, "")
    yield Figure(f"{what}: launches", sum(kernel.count for kernel in kernels) / steps, "")
    for kernel, time in timed[:SHOWN]:
        yield Figure(f"{what}: {kernel.count / steps:.3g} of {kernel.name[:60]}", time / steps, "us")
