"""Measure tile configurations on this GPU and write the best into kernels/triton/tiles/tiles.json, for its family.

    python benchmarks/tune_tiles.py [--models NAME ...] [--model FOLDER] [--dtype bfloat16] [--out FILE] [--minutes 9]

Runs from a checkout in which nothing is installed but torch, triton, transformers and numba. Other sizes keep the
entries that they have. A tile for few rows is written only if its bits were those of the one for many, here and now.
Each layer is a process of its own with a limit, the first model's before the next one's: an illegal address or a time
that is up costs one layer, and an entry is written as soon as it is found.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if find_spec("samebit") is None:  # a bare machine: the checkout itself is enough
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from samebit.benchmarks import gpu
from samebit.benchmarks import gpu_figures as gpu_measure
from samebit.benchmarks import tile_search as search
from samebit.benchmarks.rounds.limited import run_limited
from samebit.benchmarks.workloads import models
from samebit.kernels.layout.forward_context import ForwardContext, training_context
from samebit.kernels.layout.grids import KV_CHUNK
from samebit.kernels.layout.kv_pages import KVLayout
from samebit.kernels.layout.options import AttentionOptions
from samebit.kernels.ops.attention import attention
from samebit.kernels.triton import attention as attention_kernels
from samebit.kernels.triton.gradients import attention as gradient_kernels
from samebit.kernels.triton.matmul import multiply
from samebit.kernels.triton.tiles import table as tiles
from samebit.kernels.triton.tiles.file import (
    AttentionEntry,
    AttentionTile,
    MatmulEntry,
    MatmulTile,
    Rung,
    Sizes,
    read_tiles,
    write_tiles,
)
from samebit.kernels.triton.tiles.proved_equal import Layer, proved_equal

CACHE_BYTES = 1 << 28
"""Bytes of the weights that take turns, so that none is in the GPU's cache: more than any has."""

LIMIT = 150.0
"""Seconds that a layer may take."""

LAUNCHES = 20
PROMPT = 4096
CONTEXT = 1024
SEQUENCES = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=gpu.SHAPES, default=list(gpu.SHAPES))
    parser.add_argument("--minutes", type=float, default=9.0, help="all layers end by then (default 9)")
    parser.add_argument("--layer", type=int, nargs=2, metavar=("INPUTS", "OUTPUTS"), help="one layer, in this process")
    parser.add_argument(
        "--heads", type=int, nargs=3, metavar=("HEADS", "KV_HEADS", "SIZE"), help="one head size, so too"
    )
    parser.add_argument("--model", type=Path, nargs="*", default=[], help="folders with a config.json of your own")
    parser.add_argument("--dtype", choices=tiles.DTYPES, default="bfloat16")
    parser.add_argument("--out", type=Path, default=tiles.FILE, help="default: the package's own file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device")
    device, dtype = torch.device("cuda", torch.cuda.current_device()), tiles.DTYPES[args.dtype]
    if args.layer:
        bandwidth = gpu_measure.bandwidth("cuda")
        keep(args.out, device, matmul=tuned(Layer(device, *args.layer, dtype, False), args.dtype, bandwidth))
    elif args.heads:
        keep(args.out, device, attention=tuned_heads(search.Heads(*args.heads), args.dtype, device))
    else:
        configs = [*map(shape_config, args.models), *map(AutoConfig.from_pretrained, args.model)]
        tune_all(commands(configs), ["--dtype", args.dtype, "--out", str(args.out)], args.minutes)


def commands(configs: Iterable[PretrainedConfig]) -> list[list[str]]:
    """Return the options that tune one layer or head size each, those of the first model first."""
    found: dict[tuple[str, ...], None] = {}
    for config in configs:
        layers, heads = sizes_of([config])
        found |= {("--layer", *map(str, layer)): None for layer in layers}
        found |= {("--heads", *map(str, astuple(one))): None for one in heads}
    return [list(one) for one in found]


def tune_all(turns: Iterable[list[str]], more: list[str], minutes: float) -> None:
    """Run each in its process, until the time is up; say what is missing."""
    ends = time.monotonic() + 60 * minutes
    print(f"{'layer':<20}{'tile':>36}{'TFLOP/s':>9}{'torch':>7}  {'at 64 rows':>36}{'rungs':>6}{'of bandwidth':>14}")
    for options in turns:
        left = min(ends - time.monotonic(), LIMIT)
        trouble = "not run: the time was up"
        if left >= gpu.LEAST:
            command = [sys.executable, str(Path(__file__).resolve()), *options, *more]
            trouble = run_limited(command, left, lambda found: None) or ""
        if trouble:
            print(f"{' '.join(options):<40}{trouble}", flush=True)


def keep(
    path: Path, device: torch.device, matmul: MatmulEntry | None = None, attention: AttentionEntry | None = None
) -> None:
    """Write what was just found: a run that is cut short leaves what it had."""
    families = dict(read_tiles(path) if path.exists() else tiles.families())
    name = tiles.family_name(device)
    before = families.get(name, tiles.family(device))
    families[name] = before.with_entries(measured_on(), [matmul] if matmul else [], [attention] if attention else [])
    write_tiles(path, families)


def measured_on() -> str:
    """Return the GPU and versions as the file names them."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {__import__('triton').__version__}"


def shape_config(name: str) -> PretrainedConfig:
    """Return the config of one of gpu.py's models."""
    shape = gpu.SHAPES[name]
    with torch.device("meta"):
        return (models.build_hybrid(shape, 64) if "layers_block_type" in shape else
                models.build(shape, torch.bfloat16, 64)).config  # fmt: skip


def sizes_of(configs: Iterable[PretrainedConfig]) -> tuple[list[tuple[int, int]], list[search.Heads]]:
    """Return (inputs, outputs) of all linear layers, and the first attention layer of each head size."""
    layers: set[tuple[int, int]] = set()
    heads: dict[int, search.Heads] = {}
    for config in configs:
        with torch.device("meta"):
            layers.update(search.linear_layers(AutoModelForCausalLM.from_config(config)))
        count = config.num_attention_heads
        kv_heads = config.to_dict().get("num_key_value_heads") or count
        size = config.to_dict().get("head_dim") or config.hidden_size // count
        heads.setdefault(size, search.Heads(count, kv_heads, size))
    return sorted(layers), sorted(heads.values())


def tuned(layer: Layer, dtype: str, bandwidth: float) -> MatmulEntry:
    """Tune one layer; return its entry and its line of the table."""
    size = layer.inputs * layer.outputs
    copies = max(2, CACHE_BYTES // (size * layer.dtype.itemsize))
    x = torch.randn(search.PREFILL_ROWS, layer.inputs, device=layer.device).to(layer.dtype)
    weights = [torch.randn(layer.outputs, layer.inputs, device=layer.device).to(layer.dtype) for _ in range(copies)]

    def measured(tile: MatmulTile, counts: Iterable[int]) -> search.Seconds | None:
        def one(rows: int) -> float:
            return seconds(lambda turn: multiply(x[:rows], weights[turn % copies].t(), None, tile))

        return fitting(lambda: {rows: one(rows) for rows in counts})

    def equal(wide: MatmulTile, rung: Rung) -> bool:
        return all(proved_equal(replace(layer, biased=biased), wide, rung) for biased in (False, True))

    entry = search.tuned_layer(layer.inputs, layer.outputs, dtype, measured, equal)
    rate = 2e-12 * search.PREFILL_ROWS * size
    ours = measured(entry.tile, (search.PREFILL_ROWS,)) or {}
    theirs = seconds(lambda turn: F.linear(x, weights[turn % copies]))
    few = measured(entry.for_rows(64), (64,)) or {}
    needed = (size + 64 * (layer.inputs + layer.outputs)) * layer.dtype.itemsize
    print(
        f"{f'{layer.inputs} x {layer.outputs}':<20}{brief(entry.tile):>36}"
        f"{rate / ours[search.PREFILL_ROWS]:>9.0f}{rate / theirs:>7.0f}  "
        f"{brief(entry.for_rows(64)):>36}{len(entry.few):>6}{needed / few[64] / bandwidth:>14.0%}",
        flush=True,
    )
    return entry


def tuned_heads(heads: search.Heads, dtype: str, device: torch.device) -> AttentionEntry:
    """Tune one head size: the forward for a prompt and for a decode step, the gradients for a training call."""
    options = AttentionOptions(0, heads.head_dim**-0.5)
    prompt, decode = training_context((1, PROMPT), None, None, device), decode_context(heads, dtype, device)

    def rows(count: int) -> tuple[torch.Tensor, ...]:
        shapes = [(count, each, heads.head_dim) for each in (heads.heads, heads.kv_heads, heads.kv_heads)]
        return tuple(torch.randn(shape, device=device).to(tiles.DTYPES[dtype]) for shape in shapes)

    many, few = rows(PROMPT), rows(SEQUENCES)

    def forward(tile: AttentionTile) -> search.Seconds | None:
        use(AttentionEntry((dtype,), tile, tile))
        return fitting(lambda: {
            PROMPT: seconds(lambda turn: attention(*many, prompt, options)),
            SEQUENCES: seconds(lambda turn: attention(*few, decode, options)),
        })  # fmt: skip

    best = search.fastest({tile: forward(tile) for tile in search.attention_tiles()})

    def backward(tile: AttentionTile, keys: AttentionTile | None = None) -> search.Seconds | None:
        use(AttentionEntry((dtype,), best, tile, keys=keys))
        leaves = [part.clone().requires_grad_() for part in many]
        out = attention(*leaves, prompt, options)
        upstream = torch.randn_like(out)
        return fitting(lambda: {
            PROMPT: seconds(lambda turn: torch.autograd.grad(out, leaves, upstream, retain_graph=True), graph=False)
        })  # fmt: skip

    gradients = search.fastest({tile: backward(tile) for tile in search.attention_tiles()})
    keys = search.fastest({tile: backward(gradients, tile) for tile in search.attention_tiles()})
    print(
        f"heads of {heads.head_dim}: {brief(best)}, gradients of queries {brief(gradients)}, of keys {brief(keys)}",
        flush=True,
    )
    return AttentionEntry((dtype,), best, gradients, Sizes(heads.head_dim, heads.head_dim), keys)


def decode_context(heads: search.Heads, dtype: str, device: torch.device) -> ForwardContext:
    """Return the layout of a step of sequences whose context lies in pages of 64 tokens."""
    width = CONTEXT // KV_CHUNK + 1
    layout = KVLayout(1, heads.kv_heads, heads.head_dim)
    pages = layout.allocate(SEQUENCES * width, KV_CHUNK, tiles.DTYPES[dtype], device.type)
    for page in pages:
        page.normal_()
    each = np.arange(SEQUENCES, dtype=np.int32)
    return ForwardContext(
        positions=torch.full((SEQUENCES,), CONTEXT, device=device), row_start=each,
        lengths=np.ones(SEQUENCES, np.int32), starts=np.full(SEQUENCES, CONTEXT, np.int32), table_rows=each,
        block_tables=np.arange(1, SEQUENCES * width + 1, dtype=np.int32).reshape(SEQUENCES, width),
        block_size=KV_CHUNK,
        pages=tuple(pages),
    )  # fmt: skip


def use(entry: AttentionEntry) -> None:
    """Let the kernels use these tiles from here on, for any heads."""
    for module in (attention_kernels, gradient_kernels):
        module.attention_tiles = lambda device, head_dim, dtype: entry


def fitting(run: Callable[[], search.Seconds]) -> search.Seconds | None:
    """Return the times; None for a tile that does not compile or needs more than the GPU has."""
    try:
        return run()
    except (OutOfResources, CompilationError, PTXASError):
        return None


def seconds(launch: Callable[[int], Any], graph: bool = True) -> float:
    """Return the seconds of one launch: the median of five times several, as a graph to leave the host's time out."""
    launch(0)
    torch.cuda.synchronize()

    def run() -> None:
        for turn in range(LAUNCHES):
            launch(turn)

    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            run()
        run = recorded.replay
    run()
    return statistics.median(_timed(run) for _ in range(5)) / LAUNCHES


def _timed(run: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def brief(tile: MatmulTile | AttentionTile) -> str:
    sides = f"{tile.rows} x {tile.outputs} x {tile.depth}" if isinstance(tile, MatmulTile) else f"{tile.rows} rows"
    return f"{sides}, {tile.warps} warps, {tile.stages} stages"


if __name__ == "__main__":
    main()
