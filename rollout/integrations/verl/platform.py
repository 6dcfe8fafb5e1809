"""Add the platform "cpu" to verl: FSDP2 over gloo on a machine without an accelerator.

verl asks the platforms in the order of their registration, its own first; `VERL_PLATFORM=cpu` chooses this one.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase

_DRIVERS = ("/proc/driver/nvidia", "/dev/kfd", "/dev/davinci_manager")
"""Lists the devices of accelerators: beside one of them, a process that sees no accelerator is on no machine
without."""


class CPUPlatform(PlatformBase):
    """Answers what verl asks of a device for the CPU."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> Any:
        """Return `torch.cpu`, with the calls that verl makes of every device module."""
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return not any(Path(driver).exists() for driver in _DRIVERS)

    def current_device(self) -> str:
        """Return what tensors are sent to: an index would mean a CUDA device."""
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: the machine has one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: nothing runs on its own."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: these are settings of CUDA's allocator."""

    def empty_cache(self) -> None:
        """Do nothing: a CPU has no such cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Do nothing: verl's torch profiler needs no device profiler."""

    def profiler_stop(self) -> None:
        """Do nothing, as `profiler_start`."""

    def ray_resource_name(self) -> str:
        """Return what verl counts its workers in. Give Ray as many (`ray_kwargs.ray_init.num_gpus`): they are slots."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _peak_memory() -> int:
    """Return the bytes of this process at its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_info() -> tuple[int, int]:
    """Return (free, total) bytes of the machine."""
    kilobytes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(kilobytes[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    return free, total


_DEVICE_MODULE = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: "cpu",
    set_device=torch.cpu.set_device,
    synchronize=lambda *_: None,
    empty_cache=lambda: None,
    ipc_collect=lambda: None,
    current_stream=torch.cpu.current_stream,
    Stream=torch.cpu.Stream,
    stream=torch.cpu.stream,
    Event=torch.cpu.Event,
    get_device_name=lambda *_: "cpu",
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    memory_allocated=lambda *_: _peak_memory(),
    memory_reserved=lambda *_: _peak_memory(),
    max_memory_allocated=lambda *_: _peak_memory(),
    max_memory_reserved=lambda *_: _peak_memory(),
    mem_get_info=lambda *_: _memory_info(),
    set_per_process_memory_fraction=lambda *_: None,
)
