"""Read the quantized weights of a folder as bfloat16, or in the dtype of the model, one tensor at a time.

    mxfp4 (gpt-oss)           W_blocks     [experts, rows, groups, 16]   uint8: two numbers each, the low bits first
                              W_scales     [experts, rows, groups]       uint8: 127 + the exponent of 32 numbers
                              W            [experts, 32 * groups, rows]
    fp8 in blocks (DeepSeek)  W            [rows, columns]               float8_e4m3fn
                              W_scale_inv  [rows / a, columns / b]       a float, rounded up; a x b is a block
    fp8 (Ministral 3)         W            [rows, columns]               float8_e4m3fn
                              W_scale_inv  [], [1] or [1, 1]             a float, also called W_scale
    fp8 of compressed-tensors (format float-quantized) and of FBGEMM: W and W_scale, likewise, or [rows, 1]

Beside fp8 may stand what activations were to be divided by (activation_scale, input_scale), which is left out.

Invariants
----------
* A number is its value times its scale, in float32, rounded once: the bits of transformers' dequantization. An fp8
  number is rounded to the dtype in which it is taken, an mxfp4 number to bfloat16, which holds it.
* The format is the one that config.json names; a tensor that is not laid out so is an error, by its name. So is one in
  fp8 with two scales.
* Beside the tensor that is read, no more than one expert, or 512 rows, is in memory in float32.
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

_OF_ACTIVATIONS = ("activation_scale", "input_scale")
"""Names what stands beside a weight in fp8 for activations that are rounded to fp8 too."""

_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
"""Lists what compressed-tensors must say of weights that are numbers times a scale."""


@dataclass(frozen=True)
class Packed:
    """Describes a tensor that is stored in two: what it is, under its own name, and how it is made of them. What is
    ``unused`` stands beside them for the arithmetic of quantized activations."""

    spec: TensorSpec
    values: str
    scales: str
    unpack: Callable[[Tensor, Tensor], Tensor]
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """Describes the part of a matrix that has one scale: its rows and columns, None for all."""

    rows: int | None
    columns: int | None

    def __str__(self) -> str:
        return f"{self.rows or 'all rows'} x {self.columns or 'all columns'}"

    def shapes(self, whole: tuple[int, ...]) -> list[list[int]]:
        """Return the shapes that the scales of a matrix may have."""
        steps = (self.rows, self.columns)
        grid = [1 if step is None else -(-size // step) for size, step in zip(whole, steps, strict=False)]
        return [grid, [1], []] if self == _TENSOR else [grid]


_ROWS_AT_ONCE = 512

_TENSOR, _ROW = Block(None, None), Block(1, None)


class Dequantized(TensorSource):
    """Offers the tensors of a source that holds some of them quantized."""

    def __init__(self, stored: TensorSource, packed: Mapping[str, Packed]) -> None:
        self._stored = stored
        self._packed = packed

    def specs(self) -> dict[str, TensorSpec]:
        used = {name for one in self._packed.values() for name in (one.values, one.scales, *one.unused)}
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
    blocks = _float8_blocks(settings)
    if method != "mxfp4" and not blocks:
        raise WeightSourceError(
            f"the weights in {folder} are quantized (quant_method={method!r}, weight_block_size={given!r}), and that "
            "can not be dequantized here; allowed: 'mxfp4'; 'fp8', with a weight_block_size of two numbers or none; "
            "'fbgemm_fp8'; 'compressed-tensors' of the format 'float-quantized', with symmetric weights of 8 bits and "
            "a scale for each tensor, channel or block"
        )
    if not dequantize:
        raise WeightSourceError(
            f"the weights in {folder} are quantized (quant_method={method!r}); dequantize=True takes them as bfloat16"
        )
    specs = stored.specs()
    return Dequantized(stored, _packed_fp8(specs, blocks, taken_as) if blocks else _packed_mxfp4(specs))


def _float8_blocks(settings: Mapping[str, Any]) -> tuple[Block, ...]:
    """Return the blocks that may have a scale each in a folder of fp8; nothing for any other format."""
    method = settings.get("quant_method")
    if method == "fp8":
        given = settings.get("weight_block_size")
        found = [_TENSOR if given is None else _block(given)]
    elif method == "fbgemm_fp8":
        found = [_ROW]
    elif method == "compressed-tensors" and settings.get("format") == "float-quantized":
        groups = settings.get("config_groups")
        found = [_compressed_block(group) for group in groups.values()] if isinstance(groups, dict) else []
    else:
        found = []
    return () if None in found else tuple(dict.fromkeys(block for block in found if block is not None))


def _compressed_block(group: Any) -> Block | None:
    """Return what has a scale in a group of tensors of compressed-tensors; None for what is not fp8 times a scale."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or {key: weights.get(key) for key in _FLOAT8} != _FLOAT8:
        return None
    strategy = weights.get("strategy")
    if strategy == "block":
        return _block(weights.get("block_structure"))
    return {"tensor": _TENSOR, "channel": _ROW}.get(strategy) if isinstance(strategy, str) else None


def _block(given: Any) -> Block | None:
    """Return a block of two numbers; None for anything else."""
    numbers = isinstance(given, list) and len(given) == 2 and all(type(one) is int and one > 0 for one in given)
    return Block(*given) if numbers else None


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
    specs: Mapping[str, TensorSpec], blocks: tuple[Block, ...], taken_as: Callable[[str], torch.dtype]
) -> dict[str, Packed]:
    found: dict[str, Packed] = {}
    for name, spec in specs.items():
        if spec.dtype != torch.float8_e4m3fn:
            continue
        scales, block = _scales_of(spec, specs, blocks)
        whole = TensorSpec(name, spec.shape, taken_as(name))
        height, width = spec.shape
        unpack = partial(_of_fp8, rows=block.rows or height, columns=block.columns or width, dtype=whole.dtype)
        beside = (name.removesuffix("weight") + end for end in _OF_ACTIVATIONS)
        unused = tuple(one for one in beside if name.endswith(".weight") and one in specs)
        found[name] = Packed(whole, name, scales.name, unpack, unused)
    return found


def _scales_of(
    spec: TensorSpec, specs: Mapping[str, TensorSpec], blocks: tuple[Block, ...]
) -> tuple[TensorSpec, Block]:
    """Return the scales of a tensor in fp8, and what each of them is for."""
    ends = ("_scale_inv", "_scale")
    given = [specs[spec.name + end] for end in ends if spec.name + end in specs]
    if len(given) == 1 and len(spec.shape) == 2 and given[0].dtype in _SCALES:
        fitting = (block for block in blocks if list(given[0].shape) in block.shapes(spec.shape))
        block = next(fitting, None)
        if block is not None:
            return given[0], block
    shapes = " or ".join(str(shape) for block in blocks for shape in block.shapes(spec.shape))
    found = " and ".join(f"{one.name} {one}" for one in given) or f"{spec.name}_scale_inv None"
    raise WeightSourceError(
        f"{spec.name} {spec} and {found} are not fp8 in blocks of {' or '.join(map(str, blocks))}: the scales would be "
        f"float32, bfloat16 or float16 {shapes}"
    )


def _of_fp8(values: Tensor, scales: Tensor, *, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the values times the scale of their block; blocks at the lower and right edge may be smaller."""
    height, width = values.shape
    result = torch.empty(values.shape, dtype=dtype, device="cpu")
    grid = scales.float().view(-(-height // rows), -1)
    for first in range(0, height, _ROWS_AT_ONCE):
        some = torch.arange(first, min(first + _ROWS_AT_ONCE, height), device="cpu")
        spread = grid[some // rows].repeat_interleave(columns, 1)[:, :width]
        result[some] = (values[some[0] : some[-1] + 1].float() * spread).to(dtype)
    return result
