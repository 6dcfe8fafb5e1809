"""What all kernels are made with works."""

import threading
from typing import Any

import pytest
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from samebit.kernels.triton.numeric import _Kernel


def _nothing() -> None:
    pass


def test_one_thread_at_a_time_launches_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread at a time launches and compiles, as Triton shows a kernel to others before it is loaded; a thread that
    is inside may launch again.
    """
    kernels = [_Kernel(_nothing), _Kernel(_nothing)]
    both, met = threading.Barrier(2, timeout=0.1), []

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool) -> None:
        if args:
            kernels[1].run(grid=grid, warmup=warmup)
            return
        try:
            both.wait()
            met.append(self)
        except threading.BrokenBarrierError:
            both.reset()

    monkeypatch.setattr(JITFunction, "run", compiled)
    threads = [threading.Thread(target=lambda k=k: k.run("again", grid=(1,), warmup=False)) for k in kernels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == []


def test_a_gpu_that_does_not_hold_a_program_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that does not hold a program is refused by name: with Triton's error, after which the search for tiles goes
    on, and with that of a layer that is too large.
    """

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool) -> None:
        raise OutOfResources(232_449, 101_376, "shared memory")

    monkeypatch.setattr(JITFunction, "run", compiled)
    message = (
        "this GPU does not hold a layer of these sizes and dtype: it takes 232449 of shared memory for a program of "
        "_nothing, allowed: 101376"
    )
    for kind in (OutOfResources, ValueError):
        with pytest.raises(kind, match=message):
            _Kernel(_nothing).run(grid=(1,), warmup=False)
