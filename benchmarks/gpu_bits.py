"""Compare bits on one GPU, what exactness there rests on: one line for each assumption, with controls that must differ.

    python benchmarks/gpu_bits.py

Each line says whether bits are equal, and whether they should be. Begins with the tiles of a product: if one is not
equal, the others still are a ladder. A control takes the same numbers in another order of adding: where it is equal,
the operands could not have shown a difference.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

if find_spec("samebit") is None:  # a bare machine: the checkout itself is enough
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from samebit.benchmarks.rounds.limited import emit
from samebit.kernels.layout.forward_context import ForwardContext, training_context
from samebit.kernels.layout.kv_pages import KVLayout
from samebit.kernels.layout.options import AttentionOptions
from samebit.kernels.ops.attention import attention
from samebit.kernels.ops.logprobs import logprobs_from_logits
from samebit.kernels.triton import attention as attention_kernels
from samebit.kernels.triton.matmul import multiply
from samebit.kernels.triton.tiles.file import DTYPES, AttentionEntry, AttentionTile, MatmulTile
from samebit.kernels.triton.tiles.proved_equal import Layer, operands

DEPTH = 16
"""Count of elements whose products a tensor core adds at once; their order among themselves is the hardware's."""

BLOCK = 64

_TILES = (
    (128, 256, 64, 8, 3), (16, 32, 128, 4, 6), (16, 64, 128, 4, 4), (32, 64, 64, 4, 4), (64, 16, 128, 4, 6),
    (64, 32, 128, 4, 6), (64, 64, 64, 4, 6), (64, 128, 64, 4, 4), (64, 256, 64, 4, 3), (128, 64, 64, 4, 4),
    (128, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 128, 32, 8, 4), (256, 128, 64, 8, 3),
)  # fmt: skip
"""Lists the tile for many rows, and those that are compared with it."""

_ATTENTION_TILES = (
    (64, 4, 3), (64, 4, 2), (64, 8, 2), (128, 8, 2), (128, 8, 3), (128, 4, 2), (16, 1, 3), (16, 4, 3), (32, 2, 3),
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Says whether bits were equal, and whether they should be (None: it is not known before); ``note``: why not."""

    name: str
    equal: bool
    expected: bool | None
    note: str = ""


@dataclass(frozen=True)
class Heads:
    """Describes the heads that attention is compared with."""

    heads: int = 32
    kv_heads: int = 8
    size: int = 128


@dataclass(frozen=True)
class Sizes:
    """Sets how much is compared: inputs and outputs of products; tokens of attention; elements of a pool of pages."""

    layers: tuple[tuple[int, int], ...] = ((4096, 1024), (12288, 512), (896, 512))
    rows: int = 300
    counts: tuple[int, ...] = (1, 5, 16, 33)
    tiles: tuple[MatmulTile, ...] = tuple(MatmulTile(*one) for one in _TILES)
    attention_tiles: tuple[AttentionTile, ...] = tuple(AttentionTile(*one) for one in _ATTENTION_TILES)
    heads: Heads = Heads()
    tokens: int = 700
    vocab: int = 151936
    elements: int = 1 << 31


def comparisons(sizes: Sizes, device: torch.device, dtypes: tuple[str, ...]) -> Iterator[Comparison]:
    """Compare everything, what decides about the rest first."""
    for dtype in dtypes:
        for inputs, outputs in sizes.layers:
            yield from products(Layer(device, inputs, outputs, DTYPES[dtype], False), sizes)
    yield from narrow_logits(sizes, device)
    yield far_pages(sizes, device)
    yield from attentions(sizes, device)


def products(layer: Layer, sizes: Sizes) -> Iterator[Comparison]:
    """Compare tiles; orders of the depth; rows in another order; and products of zero behind the others."""
    x, weight, _ = operands(layer, sizes.rows)
    name, (wide, *others) = f"{layer.dtype} {layer.inputs} x {layer.outputs}", sizes.tiles
    whole = multiply(x, weight.t(), None, wide)
    for tile in others:

        def same(tile: MatmulTile = tile) -> bool:
            few = (slice(7, 7 + count) for count in sizes.counts)
            return torch.equal(multiply(x, weight.t(), None, tile), whole) and all(
                torch.equal(multiply(x[part].clone(), weight.t(), None, tile), whole[part]) for part in few
            )

        yield compared(f"{name}: {tile}", same, expected=True)
    blocks = torch.arange(layer.inputs, device=x.device).view(-1, DEPTH)
    backwards = blocks.flip(0).flatten()
    inside = torch.stack([block[torch.randperm(DEPTH, device=x.device)] for block in blocks]).flatten()
    for what, order, expected in (
        ("control, blocks of the depth backwards", backwards, False), ("within blocks of the depth", inside, None)
    ):  # fmt: skip
        other = multiply(x[:, order].contiguous(), weight[:, order].contiguous().t(), None, wide)
        yield Comparison(f"{name}: {what}", torch.equal(other, whole), expected)
    rows = torch.randperm(len(x), device=x.device)
    found = multiply(x[rows].contiguous(), weight.t(), None, wide)
    yield Comparison(f"{name}: rows in another order", torch.equal(found, whole[rows]), True)
    zeros, more = x.new_zeros(len(x), 64), torch.randn(len(weight), 64, device=x.device).to(x.dtype)
    longer = multiply(torch.cat([x, zeros], 1), torch.cat([weight, more], 1).t(), None, wide)
    yield Comparison(f"{name}: products of zero", torch.equal(longer, whole), True)


def narrow_logits(sizes: Sizes, device: torch.device) -> Iterator[Comparison]:
    """Compare log-probabilities of logits of sixteen bits with those of the same numbers in float32."""
    tokens = torch.randint(0, sizes.vocab, (16,), device=device)
    for name in ("bfloat16", "float16"):
        logits = (torch.randn(16, sizes.vocab, device=device) * 4).to(DTYPES[name])
        one, other = logprobs_from_logits(logits, tokens), logprobs_from_logits(logits.float(), tokens)
        yield Comparison(f"log-probabilities of {name} logits", torch.equal(one, other), True)


def far_pages(sizes: Sizes, device: torch.device) -> Comparison:
    """Compare what the same keys give in the first blocks of a pool and in its last."""
    heads, sequences, context = sizes.heads, 4, 4 * BLOCK - 6
    used = sequences * 4
    count = max(2 * used, sizes.elements // (heads.kv_heads * 2 * heads.size * BLOCK) + 2 * used)
    pages = KVLayout(1, heads.kv_heads, heads.size).allocate(count, BLOCK, torch.bfloat16, device)
    pages[0][1 : used + 1].normal_()
    pages[0][count - used + 1 :].copy_(pages[0][1 : used + 1])
    parts, found = _random_heads(heads, sequences, device), []
    each = np.arange(sequences, dtype=np.int32)
    for first in (1, count - used + 1):
        step = ForwardContext(
            positions=torch.full((sequences,), context, device=device), row_start=each,
            lengths=np.ones(sequences, np.int32), starts=np.full(sequences, context, np.int32), table_rows=each,
            block_tables=np.arange(first, first + used, dtype=np.int32).reshape(sequences, 4), block_size=BLOCK,
            pages=pages,
        )  # fmt: skip
        found.append(attention(*parts, step, AttentionOptions(0, heads.size**-0.5)))
    return Comparison(f"pages of {pages[0].numel():,} elements", torch.equal(*found), True)


def attentions(sizes: Sizes, device: torch.device) -> Iterator[Comparison]:
    """Compare tiles of attention with the first. Of fewer rows than four warps multiply at once an H100 has others."""
    parts, heads = _random_heads(sizes.heads, sizes.tokens, device), sizes.heads
    context, options = training_context((1, sizes.tokens), None, None, device), AttentionOptions(0, heads.size**-0.5)
    first, *others = sizes.attention_tiles
    with tiles_of_attention(first):
        whole = attention(*parts, context, options)
    for tile in others:

        def same(tile: AttentionTile = tile) -> bool:
            with tiles_of_attention(tile):
                return torch.equal(attention(*parts, context, options), whole)

        yield compared(f"attention: {tile}", same, expected=True if tile.rows >= max(64, 16 * tile.warps) else None)


@contextmanager
def tiles_of_attention(tile: AttentionTile) -> Iterator[None]:
    """Let attention use this tile, for any heads."""
    before = attention_kernels.attention_tiles
    attention_kernels.attention_tiles = lambda device, head_dim, dtype: AttentionEntry(("bfloat16",), tile, tile)
    try:
        yield
    finally:
        attention_kernels.attention_tiles = before


def compared(name: str, same: Callable[[], bool], *, expected: bool | None) -> Comparison:
    """Compare; a tile that does not compile or fit is not equal, and the note says why."""
    try:
        return Comparison(name, same(), expected)
    except (OutOfResources, CompilationError, PTXASError) as error:
        return Comparison(name, False, None, f"{type(error).__name__}: {str(error)[:100]}")


def _random_heads(heads: Heads, tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    counts = heads.heads, heads.kv_heads, heads.kv_heads
    return tuple(torch.randn(tokens, count, heads.size, device=device).bfloat16() for count in counts)


def main() -> int:
    """Return 1 where bits are not as expected."""
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 2
    wrong, device = 0, torch.device("cuda", torch.cuda.current_device())
    for one in comparisons(Sizes(), device, ("bfloat16", "float16")):
        emit(**asdict(one))
        wrong += one.expected is not None and one.equal != one.expected
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
