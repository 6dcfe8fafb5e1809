"""The first row of `samebit check` compares rows of GEMMs, by every number of threads that it may use."""

import pytest
import torch

from samebit.kernels.openmp import num_threads
from samebit.rollout.audit import gemm_rows

from ..kernels.helpers import THREADS
from .families import make_model


def test_products_are_compared_by_other_numbers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are compared by other numbers of threads of samebit's kernels, which torch's number does not change."""
    seen = set()
    linear, before = gemm_rows.linear, num_threads()

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.add(num_threads())
        return linear(x, weight, bias)

    monkeypatch.setattr(gemm_rows, "linear", counted)
    rows, differing, _ = gemm_rows.check_gemm_rows(make_model("Qwen3", torch.bfloat16))
    assert rows > 1000
    assert differing == 0
    assert seen >= set(THREADS)
    assert num_threads() == before
