"""Compute attention over latents on the CPU as operations call it: give the kernels of this folder arrays of tensors.

T tokens, H heads, W elements of a latent and its rotated key, R of the latent.
"""

from functools import cache

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import array
from samebit.kernels.cpu.base.memory import kind_of
from samebit.kernels.cpu.gemm import amx_tiles, dots_vectors, heads
from samebit.kernels.cpu.latent import backward, forward, write_pages
from samebit.kernels.cpu.linear import PRODUCTS_AN_ELEMENT, torch_product
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.options import LatentOptions, Saved
from samebit.kernels.openmp import num_threads

_NO_LSE = np.empty((0, 0), np.float32)
_NO_LISTS = np.empty((0, 0), np.int32)

_HEADS = 32
"""Heads that share a copy of a chunk, at most."""

_GRADIENT_HEADS = 16
"""Heads of an item of the gradients, at most. Arithmetic: what groups of them give to a latent is added up in order."""


def latent_forward(
    q: torch.Tensor,
    latents: torch.Tensor,
    context: ForwardContext,
    options: LatentOptions,
    chosen: torch.Tensor | None,
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.latent_forward`."""
    tokens, count, width = q.shape
    pages, lse = None if context.pages is None else context.pages[options.layer], None
    if pages is None:
        pages = torch.empty(context.num_blocks, context.block_size, width, dtype=latents.dtype, device="cpu")
        lse = torch.zeros(tokens, count, dtype=torch.float32, device="cpu")
    blocks, offsets, sequences, block_tables, tiles = context.read_by_layers
    memory = array(pages)
    write_pages.write_pages(latents.numel(), array(latents.contiguous()), blocks, offsets, memory)
    q = q.contiguous()
    empty = torch.empty if context.covers_all_rows else torch.zeros
    out = empty(tokens, count, options.rank, dtype=q.dtype, device="cpu")
    forward.attend(
        array(q), memory, sequences, block_tables, tiles,
        _NO_LISTS if chosen is None else chosen.numpy(), most_heads_together(count), np.float32(options.scale),
        array(out), _NO_LSE if lse is None else lse.numpy(), num_threads(),
    )  # fmt: skip
    if lse is None:
        return out, ()
    return out, (q, pages, out, lse) if chosen is None else (q, pages, out, lse, chosen)


def latent_backward(
    saved: Saved, grad: torch.Tensor, context: ForwardContext, options: LatentOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Operations.latent_backward`."""
    q, pages, out, lse, *chosen = saved
    tokens, count, width = q.shape
    together = _divisor(count, _GRADIENT_HEADS)
    grad_q = torch.zeros(q.shape, dtype=torch.float32, device="cpu")
    grad_latents = torch.zeros(count // together, tokens, width, dtype=torch.float32, device="cpu")
    backward.backward(
        array(q), array(pages), context.layout.numpy(), context.block_tables,
        chosen[0].numpy() if chosen else _NO_LISTS, together, np.float32(options.scale),
        (array(out), lse.numpy(), array(grad.contiguous())),
        (torch.empty_like(lse).numpy(), grad_q.numpy(), grad_latents.numpy()), num_threads(),
    )  # fmt: skip
    total = grad_latents[0]
    for part in grad_latents[1:]:
        total += part
    return grad_q.to(q.dtype), total.to(q.dtype)


def most_heads_together(count: int) -> int:
    """Return how many of ``count`` heads are an item's, at most."""
    return _divisor(count, _HEADS)


@cache
def _divisor(count: int, most: int) -> int:
    """Return the greatest divisor that is not more than ``most``."""
    return next(size for size in range(min(count, most), 0, -1) if count % size == 0)


def multiply_heads(x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Implement `Operations.multiply_heads`."""
    x = x if x.stride(2) == 1 else x.contiguous()
    rows, count, inputs = x.shape
    outputs = weight.shape[2] if transposed else weight.shape[1]
    out = x.new_empty(rows, count, outputs)
    product = heads.Product(
        x=heads.Rows(x.data_ptr(), x.stride(0), x.stride(1)),
        out=heads.Rows(out.data_ptr(), count * outputs, outputs),
        rows=rows,
        heads=count,
        inputs=inputs,
        outputs=outputs,
        weight=weight.data_ptr(),
        weight_step=weight.stride(0),
        transposed=transposed,
    )
    multiply = heads.multiply
    if x.dtype == torch.bfloat16 and dots_vectors.available():
        multiply = heads.multiply_by_pairs
    if x.dtype == torch.bfloat16 and amx_tiles.available():
        multiply = heads.multiply_by_tiles
    multiply(rows * count * inputs * outputs // PRODUCTS_AN_ELEMENT, product, kind_of(x.dtype))
    return out


def gradients_of_heads(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, transposed: bool, needed: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Implement `Operations.gradients_of_heads`."""
    upstream, inputs = grad.transpose(0, 1), x.transpose(0, 1)
    left, right = (inputs, upstream) if transposed else (upstream, inputs)
    of_x = torch_product(upstream, weight.mT if transposed else weight).transpose(0, 1) if needed[0] else None
    return of_x, torch_product(left.mT, right) if needed[1] else None
