"""Show where the time of a step goes: each kernel of a decode and of a prefill by name, as torch's profiler saw it.

Beside the kernels that stream memory stands what they read at least, over the bandwidth of a copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile
from transformers import PreTrainedModel

from samebit.benchmarks import gpu_figures as measure
from samebit.benchmarks.gpu_figures import Figure, Sizes
from samebit.rollout import RolloutWorker

SHOWN = 16
"""Counts the kernels of a profile that are shown: those that take longest."""


@dataclass(frozen=True)
class Kernel:
    """Says how often a kernel ran, and for how many microseconds in all."""

    name: str
    count: int
    microseconds: float


def profiles(model: PreTrainedModel, sizes: Sizes, device: str) -> Iterator[Figure]:
    """List the kernels of a decode step of many sequences, then those of a prefill."""
    count, copied = min(64, max(sizes.sequences)), measure.bandwidth(device)
    prompts, others = (measure.prompts_of(model, (length,) * count) for length in (sizes.prompt, sizes.prompt - 1))
    held = count * (sizes.prompt + sizes.new_tokens // 2) * measure.kv_bytes(model)
    least = {"_multiply": measure.weight_bytes(model) / copied * 1e6, "_attend_items": held / copied * 1e6}
    with measure.worker_of(model, sizes, count, device) as worker:
        worker.generate(prompts, measure.sampled(2))  # compiles, and fills the prefix cache
        decode = _kernels(worker, prompts, 1 + sizes.new_tokens, device)
        prefill = _kernels(worker, others, 1, device)
    yield from _figures(f"decode step of {count}", decode, 1 + sizes.new_tokens)
    for name, microseconds in least.items():
        yield Figure(f"decode step of {count}: {name}* at least", microseconds, "us")
    yield from _figures(f"prefill of {count} x {len(others[0])}", prefill, 1)


def _kernels(worker: RolloutWorker, prompts: list[list[int]], new_tokens: int, device: str) -> list[Kernel]:
    """Return what ran, on a GPU its kernels alone, the longest first.

    Raises:
        RuntimeError: the profiler saw none.
    """
    on_gpu = device == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    everywhere = _ExperimentalConfig(profile_all_threads=True)  # the worker computes in a thread of its own
    with profile(activities=[activity], experimental_config=everywhere) as seen:
        worker.generate(prompts, measure.sampled(new_tokens))
        if on_gpu:
            torch.cuda.synchronize()
    found = [
        Kernel(one.key, one.count, one.self_device_time_total if on_gpu else one.self_cpu_time_total)
        for one in seen.key_averages()
        if not on_gpu or one.device_type is DeviceType.CUDA
    ]
    if not found:
        raise RuntimeError("torch's profiler saw no kernel")
    return sorted(found, key=lambda kernel: -kernel.microseconds)


def _figures(what: str, kernels: list[Kernel], steps: int) -> Iterator[Figure]:
    yield Figure(f"{what}: all kernels", sum(kernel.microseconds for kernel in kernels) / steps, "us")
    yield Figure(f"{what}: launches", sum(kernel.count for kernel in kernels) / steps, "")
    for kernel in kernels[:SHOWN]:
        each = f"{kernel.count / steps:.3g} of {kernel.name[:60]}"
        yield Figure(f"{what}: {each}", kernel.microseconds / steps, "us")
