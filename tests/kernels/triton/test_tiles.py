"""Tile configurations are data: the file, the choice by rows, the comparison behind it, and the accuracy hold."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.triton.matmul import multiply, multiply_first
from samebit.kernels.triton.tiles.file import (
    AttentionEntry,
    AttentionTile,
    MatmulEntry,
    MatmulTile,
    Rung,
    Sizes,
    TileFileError,
    read_tiles,
    write_tiles,
)
from samebit.kernels.triton.tiles.proved_equal import Layer, proved_equal, settled
from samebit.kernels.triton.tiles.table import FILE, attention_tiles, families, matmul_tiles

from .. import reference
from ..helpers import assert_near
from .gpu import DEVICE, DTYPES, EVERY, poisoned

WIDE = MatmulTile(rows=64, outputs=64, depth=64, warps=4, stages=2)
NARROW = MatmulTile(rows=32, outputs=16, depth=64, warps=4, stages=2)
BACKWARD = MatmulTile(rows=32, outputs=32, depth=64, warps=4, stages=2)
ENTRY = MatmulEntry(("bfloat16",), WIDE, (Rung(64, NARROW), Rung(256, BACKWARD)))
LAYER = Layer(torch.device(DEVICE), 100, 77, torch.bfloat16, biased=True)


def changed(*path: str | int, value: Any) -> dict[str, Any]:
    """Return the package's file with another value at this place; None removes it."""
    content = json.loads(FILE.read_text())
    place = content
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed("default", value=None), r"no family 'default'; allowed"),
        (changed("sm_90", "tuned", value=3), r"sm_90: tuned is 3; allowed: on what it was measured, or null"),
        (changed("sm_90", "matmul", 1, "tile", "rows", value=48), r"sm_90: matmul: entry 2: tile: rows: 48; allowed: "),
        (changed("sm_90", "matmul", 1, "tile", "depth", value=8), r"tile: depth: 8; allowed: a power of two from"),
        (changed("sm_90", "matmul", 0, "tile", "stages", value=0), r"stages: 0; allowed: a whole number from 1 on"),
        (changed("sm_90", "matmul", 0, "tile", "warp", value=4), r"entry 1: tile: \[.*'warp'\]; allowed: an object of"),
        (changed("sm_90", "matmul", 0, "dtypes", value=["float64"]), r"dtypes \['float64'\]; allowed: a list of some"),
        (changed("sm_90", "matmul", 0, "outputs", value=[9, 8]), r"outputs: \[9, 8\]; allowed: a number, or \[least"),
        (changed("sm_90", "matmul", 1, "few", value=3), r"entry 2: few: 3; allowed: a list of objects of up_to_rows"),
        (
            changed("sm_90", "matmul", 1, "few", 0, "tile", value=None),
            r"few: rung 1: \['up_to_rows'\]; allowed: an obj",
        ),
        (
            changed("sm_90", "matmul", 1, "few", 1, "up_to_rows", value=64),
            r"few: up_to_rows \[64, 64, .*each more than",
        ),
        (changed("sm_90", "matmul", 0, "outputs", value=None), r"entry 5 is for the same layers as entry 1"),
        (changed("sm_90", "matmul", -1, value=None), r"sm_90: matmul: no entry for float32 of any inputs and outputs"),
        (changed("sm_90", "attention", 1, "keys", "rows", value=8), r"keys: rows: 8; allowed: a power of two from 16"),
        (changed("sm_90", "attention", 0, "head_dim", value=[1, 60]), r"no entry for bfloat16, head_dim 61"),
    ],
)
def test_a_file_that_says_something_else_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TileFileError, match=rf"^other\.json: .*{message}"):
        read_tiles(path)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    layer = replace(ENTRY, inputs=Sizes(4096, 4096), outputs=Sizes(1024, 1024))
    heads = AttentionEntry(
        ("bfloat16",), *(AttentionTile(128, 8, 2),) * 2, head_dim=Sizes(80, 80), keys=AttentionTile(64, 8, 1)
    )
    old = families()["sm_90"]
    new = old.with_entries("on an H100", [layer], [heads])
    path = tmp_path / "tiles.json"
    write_tiles(path, {**families(), "sm_90": new, "sm_75": old})
    assert read_tiles(path) == {**families(), "sm_90": new, "sm_75": old}
    assert new.for_layer(4096, 1024, "bfloat16") == layer
    assert new.for_layer(4096, 1024, "float16") == old.for_layer(4096, 1024, "float16")
    assert new.for_layer(4096, 1025, "bfloat16") == old.for_layer(4096, 1025, "bfloat16")
    assert new.for_heads(80, "bfloat16") == heads
    assert new.with_entries("again", [layer], [heads]).matmul == new.matmul


def test_the_tile_depends_on_the_layer_and_an_unknown_gpu_has_one_a_layer() -> None:
    for family in families().values():
        for entry in family.matmul:
            assert entry.for_rows(100_000) == entry.tile
            assert entry.for_rows(1) == (entry.few[0].tile if entry.few else entry.tile)
    assert not any(entry.few for entry in families()["default"].matmul)
    nowhere = torch.device("cpu")
    assert matmul_tiles(nowhere, 4096, 4096, torch.bfloat16) == families()["default"].matmul[0]
    with pytest.raises(TypeError, match=r"a matrix product of torch.float64 is not exact"):
        matmul_tiles(nowhere, 4096, 4096, torch.float64)
    with pytest.raises(ValueError, match="head_dim 257: attention on a GPU takes heads of up to 256"):
        attention_tiles(nowhere, 257, torch.bfloat16)


@pytest.mark.parametrize(
    ("outputs", "programs"), [(1024, 64), (4096, 80), (6144, 120), (12288, 144), (24576, 288), (151936, 594)]
)
def test_the_ladder_keeps_an_h100_busy(outputs: int, programs: int) -> None:
    """No launch of up to 1,024 rows of Qwen3-8B's layers has fewer programs; an H100 has 132 multiprocessors."""
    entry = families()["sm_90"].for_layer(4096, outputs, "bfloat16")
    tiles = [(rows, entry.for_rows(rows)) for rows in range(1, 1025)]
    assert min(ceil_div(rows, tile.rows) * ceil_div(outputs, tile.outputs) for rows, tile in tiles) == programs


def test_few_rows_take_a_rung_only_where_it_was_found_equal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kept = settled(LAYER, ENTRY, lambda layer, tile, rung: True)
        alone = settled(LAYER, MatmulEntry(("bfloat16",), WIDE), lambda layer, tile, rung: False)
    assert [kept.for_rows(rows) for rows in (0, 1, 64, 65, 256, 257)] == [NARROW] * 3 + [BACKWARD] * 2 + [WIDE]
    assert alone.for_rows(1) == WIDE
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        dropped = settled(LAYER, ENTRY, lambda layer, tile, rung: tile == WIDE and rung.tile != NARROW)
    assert [dropped.for_rows(rows) for rows in (0, 1, 64, 65, 4096)] == [BACKWARD] * 4 + [WIDE], "the next one's calls"
    [message] = caplog.messages
    assert "100 inputs and 77 outputs in torch.bfloat16" in message
    assert "calls of up to 64 rows take the next tile" in message


@pytest.mark.usefixtures("all_compared")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_narrow_tile_that_adds_in_another_order_is_refused(dtype: torch.dtype) -> None:
    """A narrow tile that adds in another order is refused, also where rounding to the dtype would nearly always hide
    it.

    Tiles that differ in their size alone add in one order, here and on tensor cores: in that of the depth. So a tile
    that does not is a stand-in, which takes the depth in pieces of sixteen from the last to the first.
    """

    def multiplied(x: torch.Tensor, weight: torch.Tensor, bias: Any, tile: MatmulTile, outputs: int) -> torch.Tensor:
        if tile == BACKWARD:
            order = torch.cat(torch.arange(x.shape[1], device=x.device).split(16)[::-1])
            x, weight = x[:, order], weight.t()[:, order].contiguous().t()
        return multiply_first(x, weight, bias, tile, outputs)

    large = [(96, 640, True)] if EVERY or dtype == torch.bfloat16 else []
    for inputs, outputs, biased in (*large, (129, 77, False)):
        layer = Layer(torch.device(DEVICE), inputs, outputs, dtype, biased, multiplied)
        both = MatmulEntry(("bfloat16",), WIDE, (Rung(2, NARROW), Rung(3, BACKWARD)))
        assert settled(layer, both, proved_equal).few == (Rung(2, NARROW),)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", [WIDE, NARROW, MatmulTile(128, 32, 32, 8, 3)], ids=str)
def test_each_tile_is_near_the_oracle(tile: MatmulTile, dtype: torch.dtype) -> None:
    for rows, inputs, outputs in ((1, 129, 77), (70, 64, 33), (130, 100, 16)):
        torch.manual_seed(rows)
        x, weight = torch.randn(rows, inputs).to(dtype), (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
        bias = torch.randn(outputs).to(dtype)
        found = multiply(poisoned(x), poisoned(weight).t(), bias.to(DEVICE), tile)
        assert_near(found, reference.linear(x.double(), weight.double(), bias.double()), 2)


def test_the_first_outputs_are_those_of_the_whole_layer() -> None:
    x, weight, bias = (torch.randn(shape, device=DEVICE) for shape in ((70, 64), (200, 64), (200,)))
    whole = multiply(x, weight.t(), bias, WIDE)
    assert torch.equal(multiply_first(x, weight[:128].t(), bias[:128], WIDE, 200), whole[:, :128])
    with pytest.raises(ValueError, match="100 of 200 outputs of 70 rows; allowed: a multiple of 64, and up to 512"):
        multiply_first(x, weight[:100].t(), bias[:100], WIDE, 200)
