"""Tile configurations: how much a program of each kernel takes at once. Data, no logic but the look-up.

Invariant: a configuration depends on what belongs to a layer (inputs, outputs, head size, dtype), never on the number
of rows: decode, prefill and training of a layer run one compiled kernel, and only the grid differs. A second one for
the same layer may come in only where its bits were seen to be equal on that GPU.

One default for all GPUs so far: none of these has been tuned.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MatmulTile:
    """A program computes ``rows x outputs`` and takes ``depth`` of the inputs at once."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class AttentionTile:
    """A program computes ``rows`` (query tokens times the heads that share a KV head)."""

    rows: int
    warps: int
    stages: int


_MATMUL = {
    torch.bfloat16: MatmulTile(rows=64, outputs=64, depth=64, warps=4, stages=4),
    torch.float16: MatmulTile(rows=64, outputs=64, depth=64, warps=4, stages=4),
    torch.float32: MatmulTile(rows=64, outputs=64, depth=32, warps=4, stages=2),
}

_ATTENTION = {
    64: AttentionTile(rows=64, warps=4, stages=2),
    128: AttentionTile(rows=64, warps=4, stages=2),
    256: AttentionTile(rows=64, warps=8, stages=1),
}
"""By head size, rounded up to one of these."""

_WIDE_ATTENTION = AttentionTile(rows=16, warps=8, stages=1)
"""Heads of more than 128 elements in float32: larger tiles do not fit into shared memory."""

_ROW_ELEMENTS = 2048
"""Elements that a program of a row-wise kernel takes, or one whole row."""

ELEMENTS = 1024
"""Elements that a program of an elementwise kernel takes."""


def matmul_tile(inputs: int, outputs: int, dtype: torch.dtype) -> MatmulTile:
    """Of ``[rows, inputs] @ [inputs, outputs]``.

    Raises:
        TypeError: a dtype that is not computed exactly.
    """
    if dtype not in _MATMUL:
        raise TypeError(f"a matrix product of {dtype} is not exact; allowed: {', '.join(map(str, _MATMUL))}")
    return _MATMUL[dtype]


def attention_tile(head_dim: int, dtype: torch.dtype) -> AttentionTile:
    """Of heads of this size.

    Raises:
        ValueError: larger heads than 256.
    """
    if 128 < head_dim <= 256 and dtype == torch.float32:
        return _WIDE_ATTENTION
    for size, tile in _ATTENTION.items():
        if head_dim <= size:
            return tile
    raise ValueError(f"head_dim {head_dim}: attention on a GPU takes heads of up to {max(_ATTENTION)}")


def power_of_two(size: int) -> int:
    """The next power of two from ``size`` on."""
    return 1 << (size - 1).bit_length()


def row_tile(width: int) -> tuple[int, int, int]:
    """Rows and padded width of a program of a row-wise kernel, and its warps."""
    padded = power_of_two(width)
    return max(1, _ROW_ELEMENTS // padded), padded, 4 if padded <= 4096 else 8
