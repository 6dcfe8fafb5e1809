"""Choose the keys that a row attends to: the indexer of sparse attention (DSA, DeepSeek-V3.2, 2025, section 2.1).

A row's score of a token is the sum over the indexer's heads, ascending, of ``weight * relu(scale * query . key)``, in
float32; the ``top_k`` tokens of the greatest scores up to its own are chosen.

Contract: what is chosen for a row depends on that row and on the index keys of its own sequence up to its own position,
cached or not. Of equal scores the lowest positions are chosen; 0 and -0 are equal. Nothing here has a gradient, and
nothing is copied from the device to the host.
"""

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.forward_context import TRAINING_BLOCK, ForwardContext
from samebit.kernels.layout.options import IndexOptions
from samebit.kernels.layout.shape_checks import check_dtype, check_dtype_of_cpu, check_host, check_shape
from samebit.kernels.ops.dispatch import operations_for
from samebit.kernels.ops.errors import changed_dtype
from samebit.kernels.ops.latent.attention import check_pages


@torch.no_grad()
def choose_keys(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, context: ForwardContext, options: IndexOptions
) -> torch.Tensor:
    """Put the call's index keys into their pages, then choose.

    Args:
        queries: ``[T, heads, size]`` float32 or bfloat16, rotated.
        keys: ``[T, size]``, same dtype, rotated.
        weights: ``[T, heads]`` float32.
        context: the layout of the T rows.
        options: the layer's sizes.

    Returns:
        ``[T, K]`` int32, the positions chosen for each row, ascending, and -1 behind them. K is ``top_k``, or less
        where no sequence can have as many tokens; ``[T, 0]`` stands for a call in which all are chosen.

    Raises:
        ValueError: rows that are not the context's, sizes that are not the options' or the pages'.
        TypeError: dtypes that differ, weights that are not float32, pages of another dtype.
    """
    _check(queries, keys, weights, context, options)
    return operations_for(queries).choose_keys(queries, keys, weights, context, options)


def _check(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, context: ForwardContext, options: IndexOptions
) -> None:
    rows = context.num_rows
    check_shape("the queries of the index", queries, rows, options.heads, options.size)
    check_shape("the index keys", keys, rows, options.size)
    check_shape("the weights of the index", weights, rows, options.heads)
    check_dtype("the weights of the index", weights, torch.float32)
    if queries.dtype is not keys.dtype:
        raise TypeError(f"queries of the index are {queries.dtype} and its keys {keys.dtype}; allowed: all alike")
    pages = None if context.pages is None else context.pages[options.layer]
    if pages is not None:
        check_pages("index keys", pages, options.size, context)
    if not device.on_gpu(queries):
        check_dtype_of_cpu(queries.dtype)
        check_host("the index keys", keys)
        check_host("the weights of the index", weights)
        if pages is None and context.block_size != TRAINING_BLOCK:
            raise ValueError(f"a context without pages has blocks of {context.block_size}; allowed: {TRAINING_BLOCK}")
    if pages is not None and pages.dtype is not keys.dtype:
        raise changed_dtype(f"index keys are {keys.dtype}", "pages", pages.dtype)
