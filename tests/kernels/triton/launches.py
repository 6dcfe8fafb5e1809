"""Tell which kernels run while something is computed: those of Triton by name, torch's by the operation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from .gpu import DEVICE

_NO_KERNEL = ("aten.empty", "aten.new_empty", "aten.detach", "aten.lift_fresh", "aten._unsafe_view")


class _Launches(TorchDispatchMode):
    """Notes operations that compute: neither views, nor memory that nobody has filled."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inside = False
        """Says whether a kernel of Triton runs: its interpreter uses torch."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if not (self.inside or function.is_view or name.startswith(_NO_KERNEL)):
            self.names.append(name)
        return function(*args, **kwargs or {})


@contextmanager
def launches() -> Iterator[list[str]]:
    """Collect the names; what `torch.empty` returns must not be filled, as it is where tests ask for poison."""
    holder, method = (JITFunction, "run") if DEVICE == "cuda" else (GridExecutor, "__call__")
    launch, noted = getattr(holder, method), _Launches()

    def spied(self: Any, *args: Any, **options: Any) -> Any:
        noted.names.append(self.fn.__name__)
        noted.inside = True
        try:
            return launch(self, *args, **options)
        finally:
            noted.inside = False

    with pytest.MonkeyPatch.context() as patch, noted:
        patch.setattr(holder, method, spied)
        yield noted.names
