"""A profile adds up Triton's launches as it should; a clock stands in for events of CUDA."""

from itertools import count

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.compiler.compiler import LazyDict  # noqa: E402

from samebit.benchmarks.gpu_profile import Kernel, LaunchTimes, check_times  # noqa: E402


class Event:
    """Records 1, 2, 4, 7, 11, ... microseconds."""

    numbers = count()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        number = next(self.numbers)
        self.at = 1 + number * (number + 1) / 2

    def synchronize(self) -> None:
        assert self.at

    def query(self) -> bool:
        return self.at > 20

    def elapsed_time(self, later: "Event") -> float:
        return (later.at - self.at) / 1e3


def launch(name: str) -> None:
    """Do what Triton does around a launch."""
    metadata = LazyDict({"name": name, "stream": 0})
    triton.knobs.runtime.launch_enter_hook(metadata)
    triton.knobs.runtime.launch_exit_hook(metadata)


def test_launches_are_added_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    launch("before")
    with LaunchTimes() as times:
        for name in ("short", "long", "short", "longest", "short"):
            launch(name)
    launch("after")
    found = [(kernel.name, kernel.count, kernel.microseconds) for kernel in times.kernels()]
    assert found == [("short", 3, pytest.approx(3 * 3.0)), ("long", 1, pytest.approx(3.0)), ("longest", 1, None)]


def test_too_many_launches_without_a_time_are_an_error_with_their_names() -> None:
    timed = Kernel("_multiply", 95, 8.0)
    check_times([timed, Kernel("_draw", 5, None)])
    with pytest.raises(RuntimeError, match=r"waited for each launch of these, .*: 6 of _draw$"):
        check_times([timed, Kernel("_draw", 6, None)])


def test_a_profile_without_launches_is_an_error() -> None:
    with LaunchTimes() as times, pytest.raises(RuntimeError, match="not on a GPU"):
        times.kernels()
