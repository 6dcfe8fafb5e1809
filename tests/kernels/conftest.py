"""Give the tests of kernels memory that shows what was not written, and bfloat16 as other processors multiply it."""

from collections.abc import Iterator

import pytest
import torch

from samebit.kernels.cpu.gemm import amx_tiles, dots_vectors

_PRODUCTS = {
    "float32": (torch.float32, None),
    "bfloat16, widened": (torch.bfloat16, None),
    "bfloat16, pairs": (torch.bfloat16, dots_vectors),
    "bfloat16, tiles": (torch.bfloat16, amx_tiles),
}


@pytest.fixture
def nan_in_empty() -> Iterator[None]:
    """Let torch fill what `torch.empty` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _plain_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as on a processor that has no instruction for bfloat16."""
    for instructions in (dots_vectors, amx_tiles):
        monkeypatch.setattr(instructions, "available", lambda: False)


@pytest.fixture(params=_PRODUCTS)
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Return a dtype; it is multiplied as on processors that have these instructions, where this one has them too."""
    dtype, wanted = _PRODUCTS[request.param]
    if wanted is not None and not wanted.available():
        pytest.skip("this processor has no such instructions")
    for instructions in (dots_vectors, amx_tiles):
        monkeypatch.setattr(instructions, "available", lambda found=instructions is wanted: found)
    return dtype
