"""Give tests a layer of sparse attention over latents: its inputs, its oracle, and its way through pages."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.kv_pages import SparseLayout
from samebit.kernels.layout.options import IndexOptions
from samebit.kernels.ops.latent.attention import latent_attention
from samebit.kernels.ops.latent.selection import choose_keys

from .latent_layer import Shape
from .paged import Pages, keep
from .routes import NextCount, steps


@dataclass(frozen=True)
class Sparse:
    """Holds the sizes of one layer and of its indexer."""

    shape: Shape
    heads: int
    size: int
    top_k: int

    @property
    def index(self) -> IndexOptions:
        return IndexOptions(1, self.heads, self.size, 0.25, self.top_k)  # a power of two, which rounds nothing

    def dense(self) -> "Sparse":
        """Return the layer that reads all tokens."""
        return replace(self, top_k=10_000)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Holds what a layer is given for T rows: q, latents, and the queries, keys and weights of its index."""

    q: torch.Tensor
    latents: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor

    def parts(self) -> list[torch.Tensor]:
        return [self.q, self.latents, self.queries, self.keys, self.weights]


def inputs(layer: Sparse, dtype: torch.dtype, rows: int) -> Inputs:
    """Draw inputs whose index keys, weights and queries are small whole numbers: scores are often equal, many 0."""
    torch.manual_seed(layer.top_k)
    shape = layer.shape
    q = torch.randn(rows, shape.heads, shape.options.width) * 3
    latents = torch.randn(rows, shape.options.width)
    queries = torch.randint(-1, 2, (rows, layer.heads, layer.size)).float()
    keys = torch.randint(-1, 2, (rows, layer.size)).float()
    weights = torch.randint(-1, 3, (rows, layer.heads)).float()
    return Inputs(q.to(dtype), latents.to(dtype), queries.to(dtype), keys.to(dtype), weights)


def expected_choice(given: Inputs, layer: Sparse, lengths: tuple[int, ...]) -> torch.Tensor:
    """Choose by sorting: the greatest scores, the first among equals; -1 behind. Exact for such inputs in any order."""
    chosen = torch.full((sum(lengths), layer.top_k), -1, dtype=torch.int32)
    row = 0
    for first, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
        for position in range(length):
            keys = given.keys[first : first + position + 1].double()
            products = (given.queries[row].double() @ keys.T).relu()
            scores = given.weights[row].double() @ products
            best = torch.sort(scores, descending=True, stable=True).indices[: layer.top_k].sort().values
            chosen[row, : len(best)] = best.int()
            row += 1
    return chosen


def oracle(
    q: torch.Tensor, latents: torch.Tensor, chosen: torch.Tensor, layer: Sparse, lengths: tuple[int, ...]
) -> torch.Tensor:
    """Attend in float64 from rows to the chosen ones of their sequences."""
    out, row = [], 0
    for queries, keys in zip(q.double().split(lengths), latents.double().split(lengths), strict=True):
        for query in queries:
            own = keys[chosen[row][chosen[row] >= 0].long()]
            weights = torch.softmax(query @ own.T * layer.shape.options.scale, dim=-1)
            out.append(weights @ own[:, : layer.shape.rank])
            row += 1
    return torch.stack(out)


def attended(given: Inputs, layer: Sparse, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and choice of one call."""
    chosen = choose_keys(given.queries, given.keys, given.weights, context, layer.index)
    return latent_attention(given.q, given.latents, context, layer.shape.options, chosen), chosen


def through_pages(
    given: Inputs, layer: Sparse, lengths: tuple[int, ...], block_size: int, next_count: NextCount, *,
    padding: int = 0, device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend in steps, as `latent_layer.through_pages` does; return output and choice."""
    shape = layer.shape
    layout = SparseLayout(shape.rank, shape.rope, layer.size, (True,))
    pages = Pages.deal(layout, lengths, block_size, given.q.dtype, device)
    out = torch.empty(*given.q.shape[:2], shape.rank, dtype=given.q.dtype)
    found = torch.full((len(out), layer.top_k), -1, dtype=torch.int32)
    for step in steps(lengths, next_count):
        call = Inputs(*pages.call(given.parts(), step, padding))
        result, chosen = (part.cpu() for part in attended(call, layer, pages.context(step, padding)))
        keep(result, step, out)
        spans = zip(step.starts, step.counts, strict=True)
        positions = np.concatenate([np.arange(first, first + count) for first, count in spans])
        found[step.rows] = as_lists(chosen, positions, layer)
    return out, found


def as_lists(chosen: torch.Tensor, positions: np.ndarray, layer: Sparse) -> torch.Tensor:
    """Spell out what an empty choice stands for, of the rows at these positions."""
    if chosen.shape[1]:
        return chosen[: len(positions)]
    every = torch.arange(layer.top_k, dtype=torch.int32).expand(len(positions), -1)
    return torch.where(every <= torch.from_numpy(positions)[:, None], every, -1)
