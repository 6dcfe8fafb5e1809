"""Look up tile configurations: how much a program of each kernel takes at once. The data is in ``tiles.json``.

Invariant: a configuration depends on what belongs to a layer (inputs, outputs, head size, dtype) and on the GPU, never
on the number of rows: decode, prefill and training of a layer run one compiled kernel, and only the grid differs.
Others for the same layer, for calls of few rows, come in only where their bits were seen to be equal on that GPU
(`proved_equal`).
"""

from functools import cache
from pathlib import Path

import torch
from triton.runtime import driver

from samebit.kernels.triton.tiles.file import (
    DEFAULT,
    DTYPES,
    LARGEST_HEAD,
    AttentionEntry,
    Families,
    Family,
    MatmulEntry,
    read_tiles,
)

FILE = Path(__file__).with_name("tiles.json")

_ROW_ELEMENTS = 2048
"""Count of elements that a program of a row-wise kernel takes, or one whole row."""

ELEMENTS = 1024
"""Count of elements that a program of an elementwise kernel takes."""

_MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on an H100."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@cache
def families() -> Families:
    """Return what ``tiles.json`` says."""
    return read_tiles(FILE)


def family_name(device: torch.device) -> str:
    """Return the name of the file's section: ``sm_90`` for an H100."""
    if device.type != "cuda":  # the interpreter
        return DEFAULT
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory a program may have on this device; the interpreter knows no limit."""
    if device.type != "cuda":
        return _MOST_SHARED
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


@cache
def family(device: torch.device) -> Family:
    """Return the configurations for this device."""
    return families().get(family_name(device), families()[DEFAULT])


def matmul_tiles(device: torch.device, inputs: int, outputs: int, dtype: torch.dtype) -> MatmulEntry:
    """Return the tiles of ``[rows, inputs] @ [inputs, outputs]``.

    Raises:
        TypeError: a dtype that is not computed exactly.
    """
    if dtype not in _NAMES:
        raise TypeError(f"a matrix product of {dtype} is not exact; allowed: {', '.join(map(str, _NAMES))}")
    return family(device).for_layer(inputs, outputs, _NAMES[dtype])


@cache
def attention_tiles(device: torch.device, head_dim: int, dtype: torch.dtype) -> AttentionEntry:
    """Return the tiles of heads of this size, float32, bfloat16 or float16.

    Raises:
        ValueError: larger heads than 256.
    """
    if head_dim > LARGEST_HEAD:
        raise ValueError(f"head_dim {head_dim}: attention on a GPU takes heads of up to {LARGEST_HEAD}")
    return family(device).for_heads(head_dim, _NAMES[dtype])


def power_of_two(size: int) -> int:
    """Return the next power of two from ``size`` on."""
    return 1 << (size - 1).bit_length()


def row_tile(width: int) -> tuple[int, int, int]:
    """Return rows and padded width of a program of a row-wise kernel, and its warps."""
    padded = power_of_two(width)
    return max(1, _ROW_ELEMENTS // padded), padded, 4 if padded <= 4096 else 8
