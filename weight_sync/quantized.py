"""Read the quantized weights of a folder as bfloat16, or in the dtype of the model, one tensor at a time.

    mxfp4 (gpt-oss)           W_blocks     [experts, rows, groups, 16]   uint8: two numbers each, the low bits first
                              W_scales     [experts, rows, groups]       uint8: 127 + the exponent of 32 numbers
                              W            [experts, 32 * groups, rows]
    fp8 in blocks (DeepSeek)  W            [rows, columns]               float8_e4m3fn
                              W_scale_inv  [rows / a, columns / b]       a float, rounded up; a x b is a block

Invariants
----------
* A number is its value times its scale, in float32, rounded once: the bits of transformers' dequantization. An fp8
  number is rounded to the dtype in which it is taken, an mxfp4 number to bfloat16, which holds it.
* The format is the one that config.json names; a tensor that is not laid out so is an error, by its name.
* Beside the tensor that is read, no more than one expert, or one row of blocks, is in memory in float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebit.weight_sync.manifest import TensorSpec
from samebit.weight_sync.source import TensorSource, WeightSourceError

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NIBBLES = torch.tensor([*_FP4, *(-value for value in _FP4)], device="cpu")
_PAIRS = torch.stack([_NIBBLES.repeat(16), _NIBBLES.repeat_interleave(16)], dim=1)
"""The two numbers of each byte."""

_POWERS = torch.tensor([*(math.ldexp(1.0, byte - 127) for byte in range(255)), math.nan], device="cpu")
"""The scale of each byte; the last is no number."""

_BYTES_A_GROUP = 16

_SCALES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes in which folders hold the scales of fp8: DeepSeek's float32, Qwen's bfloat16."""


@dataclass(frozen=True)
class Packed:
    """Describes a tensor that is stored in two: what it is, under its own name, and how it is made of them."""

    spec: TensorSpec
    values: str
    scales: str
    unpack: Callable[[Tensor, Tensor], Tensor]


class Dequantized(TensorSource):
    """Offers the tensors of a source that holds some of them quantized."""

    def __init__(self, stored: TensorSource, packed: Mapping[str, Packed]) -> None:
        self._stored = stored
        self._packed = packed

    def specs(self) -> dict[str, TensorSpec]:
        used = {name for one in self._packed.values() for name in (one.values, one.scales)}
        plain = {name: spec for name, spec in self._stored.specs().items() if name not in used}
        return plain | {name: one.spec for name, one in self._packed.items()}

    def load(self, name: str) -> Tensor:
        one = self._packed.get(name)
        if one is None:
            return self._stored.load(name)
        return one.unpack(self._stored.load(one.values), self._stored.load(one.scales))

    def close(self) -> None:
        self._stored.close()


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """Return what a folder's config.json says of its quantization; None for plain weights, or without that file.

    Raises:
        WeightSourceError: the file can not be read.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
        return dict(found) if found else None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WeightSourceError(f"{path} is not the config of a model: {error}") from error


def open_quantized(
    folder: Path,
    stored: TensorSource,
    settings: Mapping[str, Any],
    taken_as: Callable[[str], torch.dtype],
    *,
    dequantize: bool,
) -> Dequantized:
    """Return a source over the folder's weights, with what is stored as fp8 in the dtype that `taken_as` says by name.

    Raises:
        WeightSourceError: this was not asked for; an unknown format; a tensor that does not have it.
    """
    method, given = settings.get("quant_method"), settings.get("weight_block_size")
    block = _block_size(settings)
    if method != "mxfp4" and block is None:
        raise WeightSourceError(
            f"the weights in {folder} are quantized (quant_method={method!r}, weight_block_size={given!r}), and that "
            "can not be dequantized here; allowed: 'mxfp4', and 'fp8' with a weight_block_size of two numbers"
        )
    if not dequantize:
        raise WeightSourceError(
            f"the weights in {folder} are quantized (quant_method={method!r}); dequantize=True takes them as bfloat16"
        )
    specs = stored.specs()
    return Dequantized(stored, _packed_mxfp4(specs) if block is None else _packed_fp8(specs, block, taken_as))


def _block_size(settings: Mapping[str, Any]) -> list[int] | None:
    """Return rows and columns of a block that has a scale; None for any other format."""
    given = settings.get("weight_block_size")
    if settings.get("quant_method") != "fp8" or not isinstance(given, list) or len(given) != 2:
        return None
    return given if all(type(one) is int and one > 0 for one in given) else None


def _packed_mxfp4(specs: Mapping[str, TensorSpec]) -> dict[str, Packed]:
    found: dict[str, Packed] = {}
    for values, spec in specs.items():
        name = values.removesuffix("_blocks")
        scales = specs.get(f"{name}_scales")
        if name == values:
            continue
        fits = len(spec.shape) == 4 and spec.shape[3] == _BYTES_A_GROUP and spec.dtype == torch.uint8
        if not fits or scales is None or (scales.shape, scales.dtype) != (spec.shape[:3], torch.uint8):
            raise WeightSourceError(
                f"{values} {spec} and {name}_scales {scales} are not mxfp4: uint8 [experts, rows, groups, "
                f"{_BYTES_A_GROUP}] and [experts, rows, groups]"
            )
        experts, rows, groups, _ = spec.shape
        whole = TensorSpec(name, (experts, 2 * _BYTES_A_GROUP * groups, rows), torch.bfloat16)
        found[name] = Packed(whole, values, scales.name, _of_mxfp4)
    return found


def _of_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return `[experts, 32 * groups, rows]` of blocks `[experts, rows, groups, 16]`."""
    experts, rows, groups, _ = blocks.shape
    result = torch.empty(experts, 2 * _BYTES_A_GROUP * groups, rows, dtype=torch.bfloat16, device="cpu")
    for expert in range(experts):
        numbers = _PAIRS[blocks[expert].int()].view(rows, groups, -1)
        scaled = numbers * _POWERS[scales[expert].int()].unsqueeze(2)
        result[expert] = scaled.view(rows, -1).T
    return result


def _packed_fp8(
    specs: Mapping[str, TensorSpec], block: list[int], taken_as: Callable[[str], torch.dtype]
) -> dict[str, Packed]:
    rows, columns = block
    found: dict[str, Packed] = {}
    for name, spec in specs.items():
        if spec.dtype != torch.float8_e4m3fn:
            continue
        scales = specs.get(f"{name}_scale_inv")
        grid = [-(-size // step) for size, step in zip(spec.shape, block, strict=False)]
        if scales is None or len(spec.shape) != 2 or list(scales.shape) != grid or scales.dtype not in _SCALES:
            raise WeightSourceError(
                f"{name} {spec} and {name}_scale_inv {scales} are not fp8 in blocks of {rows} x {columns}: the scales "
                f"would be float32, bfloat16 or float16 {grid}"
            )
        whole = TensorSpec(name, spec.shape, taken_as(name))
        unpack = partial(_of_fp8, rows=rows, columns=columns, dtype=whole.dtype)
        found[name] = Packed(whole, name, scales.name, unpack)
    return found


def _of_fp8(values: Tensor, scales: Tensor, *, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the values times the scale of their block; blocks at the lower and right edge may be smaller."""
    result = torch.empty(values.shape, dtype=dtype, device="cpu")
    for number, scale in enumerate(scales.float()):
        block = slice(number * rows, (number + 1) * rows)
        result[block] = values[block].float() * scale.repeat_interleave(columns)[: values.shape[1]]
    return result
