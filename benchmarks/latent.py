"""Measure what latents gain: attention of a decode step beside the same step over a cache of each head's keys and
values, sparse attention beside dense at a long context, and the time to the first token behind a shared prefix.

    python benchmarks/latent.py [--json FILE] [--rounds N] [--quick]

README.md in this folder defines each number.
"""

# isort: split
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from samebit.benchmarks.prefix_cache import Prompts
from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Calibration, Spread, Turn, alternate, kept, ratio, spread
from samebit.benchmarks.workloads import models
from samebit.kernels.cpu.base.jit import array, compile_kernel
from samebit.kernels.cpu.latent.forward import attend_part
from samebit.kernels.cpu.latent.index import select_part
from samebit.kernels.cpu.latent.operation import most_heads_together
from samebit.kernels.cpu.latent.selection import chosen_of
from samebit.kernels.cpu.latent.write_pages import write_pages
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.kv_pages import KVLayout, LatentLayout, PageLayout, SparseLayout
from samebit.kernels.layout.options import AttentionOptions, IndexOptions, LatentOptions
from samebit.kernels.openmp import num_threads
from samebit.kernels.ops.attention import attention
from samebit.kernels.ops.latent.attention import latent_attention
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

BLOCK = 16

_NO_LSE = np.empty((0, 0), np.float32)

_write = write_pages.part


@dataclass(frozen=True)
class Heads:
    """Holds the sizes of a layer: heads, the elements of a latent, and of a head's rotated key, other
    key, and value.
    """

    heads: int
    rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True)
class Sparse:
    """Holds the sizes of a layer with an indexer: heads of its attention and of its index, elements of an index key,
    tokens that are chosen.
    """

    attention: Heads
    heads: int
    size: int
    top_k: int

    def work(self, length: int) -> float:
        """Return the products of a token with this count before it, over those of dense attention."""
        a_key = self.attention.heads * (2 * self.attention.rank + self.attention.rope)
        scored = length * self.heads * self.size if length > self.top_k else 0
        return (min(length, self.top_k) * a_key + scored) / (length * a_key)


SPARSE = Sparse(Heads(64, 512, 64, 192, 256), 32, 128, 2048)
"""GLM-5's."""

SHAPES = {"small": Heads(8, 128, 32, 64, 64), "v2_lite": Heads(16, 512, 64, 128, 128)}


@dataclass(frozen=True)
class Sizes:
    """Sets the size of the measurement. `repeats`: decode steps a turn; `shared` and `own`: tokens of a prompt."""

    sequences: int = 64
    length: int = 1024
    repeats: int = 5
    rounds: int = 7
    requests: int = 16
    shared: int = 1024
    own: int = 64
    layers: int = 4
    long: int = 16384
    long_sequences: int = 2


def decode(heads: Heads, dtype: torch.dtype, sizes: Sizes) -> dict[str, Turn]:
    """Return the turns of one layer's attention: a token each of all sequences, over latents and expanded.

    Expanded, a head's key and value are as wide as the wider of the two: the kernel knows one size.
    """
    width, wide = heads.rank + heads.rope, max(heads.nope + heads.rope, heads.value)
    rows = torch.randn(sizes.sequences, width).to(dtype)
    q = torch.randn(sizes.sequences, heads.heads, width).to(dtype)
    qkv = torch.randn(3, sizes.sequences, heads.heads, wide).to(dtype)
    latents = _step(LatentLayout(1, heads.rank, heads.rope), dtype, sizes)
    expanded = _step(KVLayout(1, heads.heads, wide), dtype, sizes)
    scale = (heads.nope + heads.rope) ** -0.5
    return {
        "latent": _repeated(
            lambda: latent_attention(q, rows, latents, LatentOptions(0, scale, heads.rank, heads.rope)), sizes.repeats
        ),
        "expanded": _repeated(
            lambda: attention(qkv[0], qkv[1], qkv[2], expanded, AttentionOptions(0, scale)), sizes.repeats
        ),
    }


def sparse_decode(layer: Sparse, dtype: torch.dtype, sizes: Sizes) -> dict[str, Turn]:
    """Return the turns of one layer's attention of a decode step over latents: all of them, and those chosen.

    The sparse turn scores, chooses and attends, in one call as in a layer of a rollout; projections are in neither.
    """
    heads, count = layer.attention, sizes.long_sequences
    rows = torch.randn(count, heads.rank + heads.rope).to(dtype)
    q = torch.randn(count, heads.heads, heads.rank + heads.rope).to(dtype)
    queries, keys = torch.randn(count, layer.heads, layer.size).to(dtype), torch.randn(count, layer.size).to(dtype)
    weights = torch.rand(count, layer.heads)
    context = _step(
        SparseLayout(heads.rank, heads.rope, layer.size, (True,)), dtype,
        replace(sizes, sequences=count, length=sizes.long),
    )  # fmt: skip
    options = LatentOptions(0, (heads.nope + heads.rope) ** -0.5, heads.rank, heads.rope)
    index = IndexOptions(1, layer.heads, layer.size, layer.size**-0.5, layer.top_k)

    def sparse() -> None:
        chosen, plan = chosen_of(context, index)
        if plan is None or context.pages is None:
            raise ValueError(f"{sizes.long} tokens: nothing is to be chosen")
        out = torch.empty(*q.shape[:2], heads.rank, dtype=dtype)
        _choose_and_attend(
            (array(keys), array(queries), array(weights), array(context.pages[1]), np.float32(index.scale)),
            (array(rows), array(q), array(context.pages[0]), np.float32(options.scale)), context.read_by_layers,
            plan.slabs, np.empty(plan.scores, np.float32), chosen.numpy(),
            most_heads_together(heads.heads), array(out), _NO_LSE, num_threads(),
        )  # fmt: skip

    return {
        "dense": _repeated(lambda: latent_attention(q, rows, context, options), sizes.repeats),
        "sparse": _repeated(sparse, sizes.repeats),
    }


@compile_kernel
def _choose_and_attend(
    of_index: Any, of_attention: Any, layout: Any, slabs: Any, scores: Any, chosen: Any, together: int, out: Any,
    no_lse: Any, threads: int,
) -> None:  # fmt: skip
    """Put index keys and latents into their pages, choose, and attend to what was chosen."""
    keys, queries, weights, index_pages, index_scale = of_index
    latents, q, pages, scale = of_attention
    blocks, offsets, sequences, block_tables, tiles = layout
    _write(1, keys, blocks, offsets, index_pages)
    _write(1, latents, blocks, offsets, pages)
    select_part(queries, weights, index_pages, sequences, block_tables, slabs, index_scale, scores, chosen, threads)
    attend_part(q, pages, sequences, block_tables, tiles, chosen, together, scale, out, no_lse, threads)


def _step(layout: PageLayout, dtype: torch.dtype, sizes: Sizes) -> ForwardContext:
    """Lay out a decode step of sequences that share nothing, behind tokens that are there: zeros that nobody wrote
    would all be read from one page of memory."""
    blocks = -(-sizes.length // BLOCK)
    sequences = np.arange(sizes.sequences, dtype=np.int32)
    pages, noise = layout.allocate(sizes.sequences * blocks, BLOCK, dtype), torch.randn(1 << 20).to(dtype)
    for part in (part for page in pages for part in page.view(-1).split(len(noise))):
        part.copy_(noise[: len(part)])
    return ForwardContext(
        positions=torch.zeros(sizes.sequences, dtype=torch.int64),
        row_start=sequences,
        lengths=np.ones(sizes.sequences, np.int32),
        starts=np.full(sizes.sequences, sizes.length - 1, np.int32),
        table_rows=sequences,
        block_tables=np.arange(1, 1 + sizes.sequences * blocks, dtype=np.int32).reshape(sizes.sequences, blocks),
        block_size=BLOCK,
        pages=pages,
    )


def _repeated(run: Callable[[], object], repeats: int) -> Turn:
    run()  # compiles

    def once(_: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - began) / repeats

    return once


def build(heads: Heads, sizes: Sizes) -> PreTrainedModel:
    """Build a DeepSeek-V3 of dense layers with such heads, in bfloat16."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=sizes.layers,
        first_k_dense_replace=sizes.layers, num_attention_heads=heads.heads, num_key_value_heads=heads.heads,
        q_lora_rank=None, kv_lora_rank=heads.rank, qk_rope_head_dim=heads.rope, qk_nope_head_dim=heads.nope,
        v_head_dim=heads.value, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()


def first_token(heads: Heads, sizes: Sizes, calibration: Calibration) -> dict[str, Spread]:
    """Compare the mean time to the first token of prompts whose beginning is cached with that of prompts that share
    nothing."""
    model = build(heads, sizes)
    prompts = Prompts(model.config.vocab_size)
    shared = prompts.tokens(sizes.shared)
    length = sizes.shared + sizes.own
    with RolloutWorker(model, config=RolloutConfig(max_model_len=length + 8)) as worker:
        worker.generate([shared], SamplingParams(max_tokens=1))

        def turn(beginning: Callable[[], list[int]]) -> Turn:
            def once(_: int) -> float:
                asked = [[*beginning(), *prompts.tokens(sizes.own)] for _ in range(sizes.requests)]
                outputs = [worker.generate([one], SamplingParams(max_tokens=1))[0] for one in asked]
                return statistics.mean(out.time_to_first_token or 0.0 for out in outputs)

            return once

        turns = {"cached": turn(lambda: shared), "cold": turn(lambda: prompts.tokens(sizes.shared))}
        steady = kept(alternate(turns, sizes.rounds, calibration), calibration)
    gain = ratio(steady, "cold", "cached")
    ideal = length / sizes.own
    return {
        "ttft_gain": gain,
        "ttft_gain_over_ideal": Spread(gain.value / ideal, gain.min / ideal, gain.max / ideal),
        "ttft_cached_ms": spread([1e3 * one.seconds["cached"] for one in steady]),
    }


def measure(sizes: Sizes, calibration: Calibration) -> dict[str, Spread]:
    """Return all figures."""
    metrics: dict[str, Spread] = {}
    for name, heads in SHAPES.items():
        for dtype, kind in models.DTYPES.items():
            steady = kept(alternate(decode(heads, kind, sizes), sizes.rounds, calibration), calibration)
            metrics[f"decode_gain_{name}_{dtype}"] = ratio(steady, "expanded", "latent")
            metrics[f"decode_ms_{name}_{dtype}"] = spread([1e3 * one.seconds["latent"] for one in steady])
    for dtype, kind in models.DTYPES.items():
        steady = kept(alternate(sparse_decode(SPARSE, kind, sizes), sizes.rounds, calibration), calibration)
        part, work = ratio(steady, "sparse", "dense"), SPARSE.work(sizes.long)
        metrics[f"sparse_over_dense_{dtype}"] = part
        metrics[f"sparse_over_work_{dtype}"] = Spread(part.value / work, part.min / work, part.max / work)
        metrics[f"sparse_ms_{dtype}"] = spread([1e3 * one.seconds["sparse"] for one in steady])
    return metrics | first_token(SHAPES["small"], sizes, calibration)


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=Sizes.rounds, of="each comparison")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    args = parser.parse_args()
    sizes = replace(Sizes(), rounds=2 if args.quick else args.rounds)
    load_before = results_file.load_average()
    metrics = measure(sizes, Calibration())
    table.show(metrics)
    if args.json:
        shapes = {name: asdict(shape) for name, shape in (SHAPES | {"sparse": SPARSE}).items()}
        meta = results_file.describe(sizes=vars(sizes), model=shapes, load_before=load_before)
        results_file.write(args.json, meta, metrics)


if __name__ == "__main__":
    main()
