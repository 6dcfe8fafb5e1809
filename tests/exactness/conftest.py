"""What several files of tests listen to."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from samebit.kernels.binding.dense import one_call, step
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.ops.dense.calls import run_layers
from samebit.kernels.ops.rope import RotaryTables


@pytest.fixture
def layers_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call of the kernels computed, and blocks of experts behind them; where embedding and head
    are in it, two more."""
    counts: list[int] = []

    def counted(x: torch.Tensor, calls: Sequence[LayerCall], tables: RotaryTables) -> tuple[torch.Tensor, Any]:
        counts.append(len(calls))
        return run_layers(x, calls, tables)

    for module in (one_call, step):
        monkeypatch.setattr(module, "run_layers", counted)
    return counts
