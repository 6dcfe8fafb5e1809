"""Let the weights of a module sleep: their memory is given back, and taken again. A copy keeps the bits.

Invariants
----------
* Parameters and persistent buffers sleep; every other buffer stays. What wakes from a copy has the same bits in the
  same memory layout, or waking raises: the copy is checksummed.
* A copy is a file without a name that only its owner may open. Whatever dies, the system frees it with the process. It
  lies in the folder for temporary files (`$TMPDIR`); where that is in memory, a copy gives no memory back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from samebit.weight_sync.digest import in_place_bytes, readable_bytes, scan, writable_bytes
from samebit.weight_sync.manifest import Manifest, live_tensors
from samebit.weight_sync.report import VerificationError


class SleepingWeights:
    """Frees the memory of a module's weights, and allocates it again."""

    def __init__(self, module: nn.Module, manifest: Manifest) -> None:
        self._module = module
        self._manifest = manifest
        self._layouts: dict[str, _Layout] = {}
        self._copy: _Copy | None = None

    @property
    def has_copy(self) -> bool:
        return self._copy is not None

    def free(self, *, keep_copy: bool) -> None:
        """Release the memory, after writing the bits to a file when `keep_copy`.

        Raises:
            OSError: there is no room for the file; nothing was released.
        """
        tensors = live_tensors(self._module)
        firsts = {names[0]: tensors[names[0]].detach() for names in self._manifest.ties}
        if keep_copy:
            self._copy = _Copy(firsts)
        self._layouts = {name: _Layout.of(tensor, kept=keep_copy) for name, tensor in firsts.items()}
        for tensor in tensors.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def restore(self) -> bool:
        """Allocate again; True when the bits came back, False when the values are undefined.

        Raises:
            VerificationError: the copy is damaged; the memory is there, its values are undefined.
        """
        tensors = live_tensors(self._module)
        damaged: list[str] = []
        for names in self._manifest.ties:
            layout = self._layouts[names[0]]
            fresh = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
            if self._copy is not None:
                self._copy.read(names[0], fresh)
                damaged += [names[0]] if scan(fresh).digest != layout.digest else []
            for name in names:
                tensors[name].data = fresh
        self._layouts = {}
        complete = self.has_copy
        self.drop_copy()
        if damaged:
            raise VerificationError(f"the copy of the weights that slept is damaged: {', '.join(damaged)}")
        return complete

    def drop_copy(self) -> None:
        if self._copy is not None:
            self._copy.close()
            self._copy = None


@dataclass(frozen=True)
class _Layout:
    """Holds what allocates a tensor again: `shape` and `stride` as it lay in memory; `digest` of its copy."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    digest: int | None

    @classmethod
    def of(cls, tensor: Tensor, *, kept: bool) -> _Layout:
        digest = scan(tensor).digest if kept else None
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, digest)


class _Copy:
    """Holds the bits of tensors, in a file without a name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors. Raises `OSError` when there is no room."""
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
        in_place = in_place_bytes(target) is not None
        whole = target if in_place else torch.empty(target.shape, dtype=target.dtype, device="cpu")
        self._file.seek(self._begins[name])
        self._file.readinto(writable_bytes(whole).data)
        if whole is not target:
            target.copy_(whole)

    def close(self) -> None:
        self._file.close()
