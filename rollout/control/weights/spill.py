"""Keep a copy of tensors in a file, while their memory is given back.

Invariant: the file has no name and only its owner may open it. Whatever dies, the system frees it with the process.
It lies in the folder for temporary files (`$TMPDIR`); where that is in memory, a spill gives no memory back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor

from samebit.weight_sync.digest import in_place_bytes, readable_bytes, writable_bytes


class Spill:
    """Holds the bits of tensors, in a file without a name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Write them. Raises `OSError` when there is no room."""
        self._begins: dict[str, int] = {}
        with ExitStack() as stack:
            self._file = stack.enter_context(tempfile.TemporaryFile())
            for name, tensor in tensors.items():
                self._begins[name] = self._file.tell()
                self._file.write(readable_bytes(tensor).data)
            self._file.flush()
            stack.pop_all()

    def read(self, name: str, target: Tensor) -> None:
        """Fill a tensor of the shape and dtype that was written. What the file has lost is undefined."""
        whole = target if in_place_bytes(target) is not None else torch.empty(target.shape, dtype=target.dtype)
        self._file.seek(self._begins[name])
        self._file.readinto(writable_bytes(whole).data)
        if whole is not target:
            target.copy_(whole)

    def close(self) -> None:
        self._file.close()
