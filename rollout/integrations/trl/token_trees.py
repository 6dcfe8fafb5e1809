"""Unfold the trees of tokens that TRL's AsyncGRPO trains on (`trl.experimental.async_grpo.packing.TreeRow`).

Samples that begin alike share the positions of what they begin with, and an attention of its own shows each position
its own path. A bound model takes sequences. So each path from the root to a leaf becomes one, and a shared position is
scored in the first of them: in the others it would have the same bits, and the same gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

IGNORED = -100

TREE_INPUTS = (
    "tree_kv_index",
    "tree_cu_seqlens_q",
    "tree_cu_seqlens_k",
    "tree_max_seqlen_q",
    "tree_max_seqlen_k",
)
"""Lists what TRL passes with a tree; the longest lengths say nothing that the others do not."""


@dataclass(frozen=True)
class TokenTree:
    """Holds a tree as sequences, end to end: M tokens of the paths of a row of N positions.

    Attributes:
        places: ``[M]`` int64, the position in the row that each token is.
        token_ids: ``[M]`` int64.
        positions: ``[M]`` int64; a sequence begins at each 0.
        scored: ``[M - 1]`` bool: entry t is about token t + 1, which is the label of the position that t is.
    """

    places: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    scored: torch.Tensor

    @staticmethod
    def of(
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        shift_labels: torch.Tensor,
        *,
        tree_kv_index: torch.Tensor | None = None,
        tree_cu_seqlens_q: torch.Tensor | None = None,
        tree_cu_seqlens_k: torch.Tensor | None = None,
        tree_max_seqlen_q: int = 0,
        tree_max_seqlen_k: int = 0,
    ) -> TokenTree:
        """Unfold a row ``[N]``; without the tree's inputs it is sequences already.

        Raises:
            ValueError: a label that is not the next token of its path.
        """
        if tree_kv_index is None or tree_cu_seqlens_q is None or tree_cu_seqlens_k is None:
            paths = [torch.arange(len(input_ids), device=input_ids.device)]
        else:
            paths = _leaf_paths(tree_kv_index, tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist())
        places = torch.cat(paths)
        token_ids, positions, labels = input_ids[places], position_ids[places], shift_labels[places][:-1]
        labelled = labels != IGNORED
        if not torch.equal(labels[labelled], token_ids[1:][labelled]):
            raise ValueError("shift_labels other than the next tokens of input_ids can not be scored")
        return TokenTree(places, token_ids, positions, labelled & _first_of_each(places)[:-1])


def _leaf_paths(kv_index: torch.Tensor, ends_q: list[int], ends_k: list[int]) -> list[torch.Tensor]:
    """Return, for each segment that no other goes on from, the positions from the root to its end."""
    paths = [kv_index[start:end].long() for start, end in pairwise(ends_k)]
    lengths = [end - start for start, end in pairwise(ends_q)]
    inner = {int(path[-length - 1]) for path, length in zip(paths, lengths, strict=True) if len(path) > length}
    return [path for path in paths if int(path[-1]) not in inner]


def _first_of_each(places: torch.Tensor) -> torch.Tensor:
    """Return which entries are the first of their value."""
    _, inverse = places.unique(return_inverse=True)
    order = torch.arange(len(places), device=places.device)
    first = torch.full_like(order, len(places)).scatter_reduce(0, inverse, order, "amin")
    return first[inverse] == order
