"""Listen to what several files of tests look at."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from samebit.kernels.binding.layers import one_call, step
from samebit.kernels.cpu.layers import calls
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.ops.layers.calls import run_layers


@pytest.fixture
def layers_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List how many layers each call of the kernels computed, and blocks of experts behind them; where embedding and
    head are in it, two more.
    """
    counts: list[int] = []

    def counted(x: torch.Tensor, calls: Sequence[LayerCall], tables: Any) -> tuple[torch.Tensor, Any]:
        counts.append(len(calls))
        return run_layers(x, calls, tables)

    for module in (one_call, step):
        monkeypatch.setattr(module, "run_layers", counted)
    return counts


_UNWRITTEN, _GUARD, _GUARD_BYTES = 0xFF, 0xA5, 1 << 18  # bytes of 0xFF are NaN in each dtype


@pytest.fixture
def rooms_with_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each call of layers a room of just the size that it asked for, full of NaN, with an end that stays.

    A kernel lays out what is in its room by itself, and the host computes the size by another formula: one that is too
    small would let the kernel write over other memory of the process.
    """
    compute, asked = calls._kernel, list[torch.Tensor]()

    def room(context: ForwardContext, size: int) -> torch.Tensor:
        whole = torch.full((size + _GUARD_BYTES,), _GUARD, dtype=torch.uint8)
        whole[:size] = _UNWRITTEN
        asked.append(whole)
        return whole[:size]

    def computed(*args: Any) -> None:
        compute(*args)
        assert (asked.pop()[-_GUARD_BYTES:] == _GUARD).all(), "a layer wrote behind its room"

    monkeypatch.setattr(calls, "_room", room)
    monkeypatch.setattr(calls, "_kernel", computed)
