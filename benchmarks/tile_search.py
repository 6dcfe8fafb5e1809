"""List the candidates among tiles, and choose among measured ones: everything of tune_tiles.py but the clock.

The tile of a layer is the fastest at 4,096 rows. Its ladder is climbed down from there: at 1,024, 512, 256, 128, 64 and
16 rows the fastest tile that is at least 2% faster than the one above, and that gives the bits of the layer's tile,
with bias and without (`kernels/triton/tiles/proved_equal.py`). The tile of attention has the smallest product of two
times, of a prompt of 4,096 tokens and of a decode step of 64 sequences of 1,024 tokens; gradients of queries have a
tile of their own, and then gradients of keys and values. Tiles that do not compile or fit are skipped.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn

from samebit.kernels.triton.tiles.file import AttentionTile, MatmulEntry, MatmulTile, Rung, Sizes

PREFILL_ROWS = 4096
DECODE_ROWS = (16, 64, 128, 256, 512, 1024)
GAIN = 0.98
"""Another tile is worth it where it takes less than this share of the time of the one for more rows."""

Seconds = Mapping[int, float]
"""Holds seconds by rows of the call."""

Tile = TypeVar("Tile", MatmulTile, AttentionTile)


@dataclass(frozen=True, order=True)
class Heads:
    """Describes the heads of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int


_MANY = (
    (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 256, 32, 8, 4), (128, 128, 32, 4, 4),
    (64, 64, 32, 4, 3),
)  # fmt: skip
"""Lists tiles for thousands of rows; the last two are for GPUs with less shared memory, and for float32."""

_FEW = (
    (16, 32, 128, 4, 6), (16, 64, 128, 4, 4), (64, 16, 128, 4, 6), (64, 32, 128, 4, 4), (64, 64, 128, 4, 3),
    (64, 64, 64, 4, 6), (64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 4, 4),
)  # fmt: skip
"""Lists tiles for few rows: more programs, more bytes in flight."""

_ATTENTION = (
    (16, 4, 2), (32, 4, 2), (64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 8, 1), (64, 8, 2), (128, 8, 1), (128, 8, 2),
    (128, 8, 3),
)  # fmt: skip

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names the layers of a module that are computed in one launch."""


def wide_tiles() -> Iterator[MatmulTile]:
    """Return tiles for many rows."""
    return (MatmulTile(*one) for one in _MANY)


def narrow_tiles() -> Iterator[MatmulTile]:
    """Return tiles for few rows."""
    return (MatmulTile(*one) for one in _FEW)


def attention_tiles() -> Iterator[AttentionTile]:
    return (AttentionTile(*one) for one in _ATTENTION)


def linear_layers(model: nn.Module) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of the linear layers, and of those that share a launch as of one layer, each once."""
    found = set()
    for module in model.modules():
        linear = {name: one for name, one in module.named_children() if isinstance(one, nn.Linear)}
        found |= {(one.in_features, one.out_features) for one in linear.values()}
        for names in _TOGETHER:
            if set(names) <= set(linear):
                found.add((linear[names[0]].in_features, sum(linear[name].out_features for name in names)))
    return sorted(found)


def tuned_layer(
    inputs: int, outputs: int, dtype: str, measured: Callable[[MatmulTile, Iterable[int]], Seconds | None],
    equal: Callable[[MatmulTile, Rung], bool],
) -> MatmulEntry:  # fmt: skip
    """Return the entry for one layer.

    Args:
        inputs: K.
        outputs: N.
        dtype: as the file writes it.
        measured: the times of a tile by the number of rows of a call; None where it does not compile or fit.
        equal: whether the tile of a rung has the bits of a tile for many rows, the first argument.

    Raises:
        ValueError: no candidate compiles and fits.
    """
    wide = fastest({tile: measured(tile, (PREFILL_ROWS,)) for tile in wide_tiles()})
    entry = MatmulEntry((dtype,), wide, inputs=Sizes(inputs, inputs), outputs=Sizes(outputs, outputs))
    times = {tile: measured(tile, DECODE_ROWS) for tile in {*narrow_tiles(), *wide_tiles()}}
    rungs: list[Rung] = []
    above = wide
    for rows in reversed(DECODE_ROWS):
        before = times[above]
        if before is None:
            break
        faster = {tile: each[rows] for tile, each in times.items() if each and each[rows] < GAIN * before[rows]}
        found = (Rung(rows, tile) for tile in sorted(faster, key=lambda tile: faster[tile]))
        rung = next((one for one in found if equal(wide, one)), None)
        if rung is not None:
            rungs.insert(0, rung)
            above = rung.tile
    return replace(entry, few=tuple(rungs))


def fastest(times: Mapping[Tile, Seconds | None]) -> Tile:
    """Return the tile with the least product of its times, so that slow kinds of call count no more than fast ones.

    Raises:
        ValueError: none was measured.
    """
    found = {tile: math.prod(each.values()) for tile, each in times.items() if each is not None}
    if not found:
        raise ValueError(f"none of {len(times)} candidates compiles and fits")
    return min(found, key=lambda tile: found[tile])
