"""Tell whether a decoder layer's one call may have what it is given: its kernel trusts addresses and sizes."""

from collections.abc import Iterable, Sequence
from itertools import repeat

import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.weights import LayerWeights
from samebit.kernels.layout.lora.adapters import PlacedTerms, RowAdapters
from samebit.kernels.ops.rope import RotaryTables


def call_fits(context: ForwardContext, terms: Iterable[PlacedTerms | None]) -> bool:
    """Return whether the call is a rollout's, of all its rows, with adapters for rows that are there, whose matrices
    are float32 or of the layers' dtype."""
    return (
        context.pages is not None
        and context.covers_all_rows
        and not torch.is_grad_enabled()
        and all(placed is None or placed.fit_one_call for placed in terms)
        and (context.adapters is None or _rows_are_there(context.adapters, context.num_rows))
    )


def _rows_are_there(adapters: RowAdapters, count: int) -> bool:
    first, last = adapters.bounds
    return first >= 0 and last < count


def rows_fit(x: torch.Tensor, tables: RotaryTables, width: int) -> bool:
    """Return whether ``x`` is ``[..., width]`` for the T rows of the tables' context, whose angles can be read."""
    return (
        x.size(-1) == width
        and x.numel() == tables.context.num_rows * width
        and tables.cos.is_contiguous()
        and tables.sin.is_contiguous()
    )


def weights_fit(
    weights: LayerWeights, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, last: Sequence[torch.dtype] = ()
) -> bool:
    """Return whether the weights that are there have these shapes and this dtype, those at the end the ``last`` ones,
    contiguous on the CPU: found out once."""
    if dtype not in weights.worked_out:
        dtypes = [*repeat(dtype, len(weights.flat) - len(last)), *last]
        weights.worked_out[dtype] = _fit(weights, shapes, dtypes)
    fits: bool = weights.worked_out[dtype]
    return fits


def _fit(weights: LayerWeights, shapes: Iterable[tuple[int, ...]], dtypes: Iterable[torch.dtype]) -> bool:
    for weight, shape, dtype in zip(weights.flat, shapes, dtypes, strict=True):
        if weight is not None and not (
            weight.shape == shape
            and weight.dtype is dtype
            and weight.is_cpu
            and weight.is_contiguous()
            and weight.data_ptr()  # where storage was freed, the modules' calls say so
        ):
            return False
    return True


def pages_fit(pages: torch.Tensor, tables: RotaryTables, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether a layer's pages ``[blocks, *shape]`` are contiguous and have all blocks that are written to."""
    return (
        pages.dtype is dtype
        and pages.shape[1:] == shape
        and pages.is_contiguous()
        and tables.context.last_written_block < len(pages)
    )
