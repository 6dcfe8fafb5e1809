"""Turn what `receive_weights` accepts into named tensors that are loaded one at a time.

Invariants
----------
* `specs()` reads no tensor data; `load(name)` reads one tensor and may be called more than once (the
  finite check and the copy each read it).
* Names are the source's own: the manifest knows where each goes.
* Files are safetensors only: nothing is unpickled. A shard named by an index lies in the same folder.
* Of a folder are read the files that transformers reads: the single one, else those of the index, else, beyond
  transformers, all there are.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samebit.weight_sync.closing import Closing
from samebit.weight_sync.manifest import TensorSpec, check_name, live_tensors

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightSourceError(ValueError):
    """The source itself can not be read: a missing folder, a folder without weights, a damaged file."""


class _SafeSlice(Protocol):
    def get_dtype(self) -> str: ...

    def get_shape(self) -> list[int]: ...


class _SafeFile(Protocol):
    """Names the part of `safetensors.safe_open` that is used here; the package has no types of its own."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _SafeSlice: ...

    def get_tensor(self, name: str) -> Tensor: ...


class TensorSource(Closing, ABC):
    @abstractmethod
    def specs(self) -> dict[str, TensorSpec]: ...

    @abstractmethod
    def load(self, name: str) -> Tensor: ...


def open_source(source: object) -> TensorSource:
    """Return a source over a dict of tensors, a module, or a folder of safetensors."""
    if isinstance(source, nn.Module):
        return TensorDict(live_tensors(source))
    if isinstance(source, str | Path):
        return SafetensorsFolder(Path(source))
    if isinstance(source, Mapping):
        return TensorDict(checked_dict(source))
    raise TypeError(
        "weights can come from a dict of tensors, an nn.Module or a folder with *.safetensors, a WeightStream or "
        f"the receiving end of a link, not from {type(source).__name__}"
    )


def checked_dict(source: Mapping[Any, object]) -> dict[str, Tensor]:
    """Return a mapping of names to tensors as a dict; raise `TypeError` for one of anything else."""
    tensors: dict[str, Tensor] = {}
    for name, value in source.items():
        if not isinstance(name, str):
            raise TypeError(f"weight names are strings, got {name!r}")
        if not isinstance(value, Tensor):
            raise TypeError(f"weight {name!r} is a {type(value).__name__}, not a tensor")
        tensors[name] = value
    return tensors


def check_readable(tensors: Mapping[str, Tensor]) -> None:
    """Raise `WeightSourceError` with the names of tensors that hold no values, or are not dense."""
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise WeightSourceError(f"these tensors are on the device 'meta' and hold no values: {', '.join(meta)}")
    packed = [f"{name} ({tensor.layout})" for name, tensor in tensors.items() if tensor.layout is not torch.strided]
    if packed:
        raise WeightSourceError(f"these tensors are not dense: {', '.join(packed)}")


def _check_whole(tensors: Mapping[str, Tensor]) -> None:
    sharded = [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]
    if sharded:
        raise WeightSourceError(
            f"these tensors are sharded (DTensor): {', '.join(sharded)}; allowed: WeightStream.of(model or dict), "
            "which gathers each in its turn, and which every rank goes through"
        )


class TensorDict(TensorSource):
    """Reads tensors that are in memory already."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        check_readable(tensors)
        _check_whole(tensors)
        self._tensors = tensors

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec.of(name, tensor) for name, tensor in self._tensors.items()}

    def load(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def close(self) -> None:
        """Do nothing: the tensors belong to the caller."""


class SafetensorsFolder(TensorSource):
    """Reads a folder with `*.safetensors`, sharded by an index or not."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise WeightSourceError(f"no such folder: {folder}")
        self._files = _index_files(folder)
        self._open: dict[Path, _SafeFile] = {}

    def specs(self) -> dict[str, TensorSpec]:
        return {name: self._spec(name, path) for name, path in self._files.items()}

    def load(self, name: str) -> Tensor:
        path = self._files[name]
        try:
            return self._handle(path).get_tensor(name)
        except SafetensorError as error:
            raise WeightSourceError(f"can not read {name} from {path}: {error}") from error

    def _spec(self, name: str, path: Path) -> TensorSpec:
        try:
            view = self._handle(path).get_slice(name)
        except SafetensorError as error:
            raise WeightSourceError(f"{path} has no tensor {name}: {error}") from error
        code = view.get_dtype()
        if code not in _DTYPES:
            raise WeightSourceError(f"{name} in {path} has dtype {code}, which is not supported")
        return TensorSpec(name, tuple(view.get_shape()), _DTYPES[code])

    def _handle(self, path: Path) -> _SafeFile:
        if path not in self._open:
            self._open[path] = _open_file(path)
        return self._open[path]

    def close(self) -> None:
        self._open.clear()


def _index_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, from the index or, without one, from the files themselves."""
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if single.is_file():
        return dict.fromkeys(_open_file(single).keys(), single)  # an index beside it is of another save
    if index.is_file():
        return _read_index(index)
    files: dict[str, Path] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WeightSourceError(f"no *.safetensors in {folder}")
    for path in paths:
        if not path.is_file():
            raise WeightSourceError(f"{path} is not a file")
        names = _open_file(path).keys()
        for name in names:
            if name in files:
                raise WeightSourceError(f"{name} is in both {files[name].name} and {path.name}")
            files[name] = path
    return files


def _read_index(index: Path) -> dict[str, Path]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, file in weight_map.items():
            check_name(name)
            check_name(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightSourceError(f"{index} is not a safetensors index: {error}") from error
    for file in set(weight_map.values()):
        if Path(file).name != file:
            raise WeightSourceError(f"{index} names {file!r}, which is not a plain file name")
        if not _is_file(index.parent / file):
            raise WeightSourceError(f"{index} names {file!r}, which is missing")
    return {name: index.parent / file for name, file in weight_map.items()}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _open_file(path: Path) -> _SafeFile:
    try:
        return cast(_SafeFile, safe_open(str(path), framework="pt"))
    except (SafetensorError, OSError) as error:
        raise WeightSourceError(f"{path} is not a readable safetensors file: {error}") from error
