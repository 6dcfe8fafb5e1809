"""Make decode steps of sequences that begin with the same physical blocks, for the tests of attention on a GPU."""

from dataclasses import dataclass

import numpy as np
import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.kv_pages import KVLayout
from samebit.kernels.ops.attention import attention

from . import reference
from .attention_layer import Shape


@dataclass(frozen=True)
class Group:
    """Holds sequences of these lengths, newest tokens included, that begin with the same ``common`` tokens."""

    common: int
    lengths: tuple[int, ...]


class Decode:
    """Holds the newest tokens of the sequences of some groups, in an order in which the groups are mixed or not."""

    def __init__(self, shape: Shape, dtype: torch.dtype, groups: tuple[Group, ...], mixed: bool = False) -> None:
        torch.manual_seed(shape.head_dim)
        self.shape, self.dtype = shape, dtype
        self.lengths = [length for group in groups for length in group.lengths]
        self.group_of = [number for number, group in enumerate(groups) for _ in group.lengths]
        self.common = [group.common for group in groups]
        self.order = np.random.default_rng(0).permutation(len(self.lengths)) if mixed else range(len(self.lengths))
        first = [self._tokens(group.common) for group in groups]
        rest = [self._tokens(n - self.common[g]) for n, g in zip(self.lengths, self.group_of, strict=True)]
        self.cached = [torch.cat([first[g], own], dim=1) for g, own in zip(self.group_of, rest, strict=True)]
        self.queries = [torch.randn(n, shape.heads, shape.head_dim).to(dtype) * 3 for n in self.lengths]

    def _tokens(self, count: int) -> torch.Tensor:
        """Draw keys and values ``[2, count, KV heads, D]``."""
        return torch.randn(2, count, self.shape.kv_heads, self.shape.head_dim).to(self.dtype)

    def expected(self, new: int = 1) -> list[torch.Tensor]:
        """Return the oracle's rows of the last ``new`` tokens of each sequence."""
        options = self.shape.options
        return [
            reference.attention(
                query[-new:],
                *cached,
                self.shape.sinks,
                scale=options.scale,
                window=options.window,
                softcap=options.softcap,
            )
            for query, cached in zip(self.queries, self.cached, strict=True)
        ]

    def found(
        self, block_size: int, device: str, *, shared: bool = True, only: int | None = None, long: int | None = None
    ) -> tuple[list[torch.Tensor], ForwardContext]:
        """Return the kernel's rows, of each sequence in turn, and the layout of the call.

        ``shared``: the tokens in common lie in the same blocks. ``only``: this sequence alone. ``long``: this one
        computes its last three tokens. Blocks are dealt out at random, unused memory is NaN.
        """
        tables, pages = self._memory(block_size, shared)
        chosen = [s for s in self.order if only in (None, s)]
        counts = np.array([3 if s == long else 1 for s in chosen], np.int32)
        starts = np.array([self.lengths[s] for s in chosen], np.int32) - counts
        for s, start in zip(chosen, starts, strict=True):
            _put(pages, tables[s], self.cached[s][:, :start], block_size)
        context = ForwardContext(
            positions=torch.zeros(int(counts.sum()), dtype=torch.int64, device=device),
            row_start=(np.cumsum(counts) - counts).astype(np.int32), lengths=counts, starts=starts,
            table_rows=np.array(chosen, np.int32), block_tables=tables, block_size=block_size,
            pages=(pages.to(device),),
        )  # fmt: skip
        sizes = list(zip(chosen, counts, strict=True))
        q = torch.cat([self.queries[s][-n:] for s, n in sizes]).to(device)
        k, v = (torch.cat([self.cached[s][part, -n:] for s, n in sizes]).to(device) for part in (0, 1))
        sinks = None if self.shape.sinks is None else self.shape.sinks.to(device)
        rows = attention(q, k, v, context, self.shape.options, sinks).cpu().split(counts.tolist())
        return [rows[at] for at in np.argsort(chosen)], context

    def _memory(self, block_size: int, shared: bool) -> tuple[np.ndarray, torch.Tensor]:
        """Return block tables, whose unused entries name no block, and pages full of NaN."""
        needed = [-(-length // block_size) for length in self.lengths]
        dealt = iter(np.random.default_rng(1).permutation(sum(needed)) + 1)
        tables = np.full((len(needed), max(needed)), np.iinfo(np.int32).max, np.int32)
        leaders: dict[int, int] = {}
        for s, (count, group) in enumerate(zip(needed, self.group_of, strict=True)):
            leader = leaders.setdefault(group, s)
            same = self.common[group] // block_size if shared and leader != s else 0
            tables[s, :same] = tables[leader, :same]
            tables[s, same:count] = [next(dealt) for _ in range(count - same)]
        layout = KVLayout(1, self.shape.kv_heads, self.shape.head_dim)
        return tables, layout.allocate(sum(needed), block_size, self.dtype, "cpu")[0].fill_(torch.nan)


def _put(pages: torch.Tensor, table: np.ndarray, cached: torch.Tensor, block_size: int) -> None:
    """Write keys and values ``[2, n, KV heads, D]`` where Triton's kernels look for them."""
    n, kv_heads, head_dim = cached.shape[1:]
    token = np.arange(n)
    view = pages.view(-1, kv_heads, 2, block_size, head_dim)
    view[table[token // block_size], :, :, token % block_size] = cached.permute(1, 2, 0, 3)
