"""Run a decoder of layers that are one call each (`LayerFamily.norms`) in a rollout, without what transformers does
around them: masks, caches, and outputs that nobody asks for took a quarter of a small model's step.

Invariants:

* The modules are called as the class's own forward calls them, in its order: hooks and forwards of theirs count.
  Layers that are one call each are computed without calling them where nobody listens, all in one call where they can.
* A class whose forward is not transformers' own, a call that asks for more than hidden states, and one whose output a
  hook sees run as they are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from types import FunctionType
from typing import Any

import torch

from samebit.kernels.binding.layers.known import Found, known_layers
from samebit.kernels.binding.layers.one_call import all_computed, computed, one_call_forward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.ops.linear import is_hooked
from samebit.kernels.ops.rope import RotaryTables


@dataclass(eq=False)
class DecoderOutput:
    """Holds what callers read of a decoder's output; to make transformers' own takes longer than a norm."""

    last_hidden_state: torch.Tensor
    past_key_values: None = None
    cache: None = None  # its name since transformers 5.24
    hidden_states: None = None
    attentions: None = None
    router_logits: None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the hidden states, which are all that there is."""
        return (self.last_hidden_state,)[index]


def runs_plainly(decoder: Any, context: ForwardContext, asked: dict[str, Any]) -> bool:
    """Return whether it is a call of a rollout, of transformers' own forward, that asks for hidden states alone.

    Args:
        decoder: of such a family.
        context: of the call.
        asked: its arguments by name, but for positions and mask.
    """
    if context.pages is None or torch.is_grad_enabled() or is_hooked(decoder):
        return False
    own = type(decoder).forward
    known = isinstance(own, FunctionType) and own.__globals__["__name__"].startswith("transformers.")
    return known and all(value is None or value is False or name == "input_ids" for name, value in asked.items())


def embedded(decoder: Any, ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
    """Return the embeddings ``[B, T, hidden]`` of tokens, and in the rows of images their features instead."""
    hidden: torch.Tensor = decoder.embed_tokens(ids)
    images = context.images
    features = None if images is None else images.embeddings(hidden.shape[-1])
    return hidden if images is None or features is None else _put(hidden, images.rows, features)


def _put(hidden: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return hidden states ``[B, T, hidden]`` with these values in some rows of ``[B * T]``."""
    values = values.to(hidden.device, hidden.dtype)
    return hidden.flatten(0, 1).index_copy(0, rows.to(hidden.device), values).view_as(hidden)


def plain_decoder(decoder: Any, ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> DecoderOutput:
    """Return the hidden states of ``ids`` ``[B, T]``; the layout is that of the context, which is installed."""
    hidden = embedded(decoder, ids, context)
    factor = factor_of(decoder)
    hidden = hidden if factor is None else hidden * factor
    tables = angles_of_layers(decoder, decoder._modules[decoder.samebit.names.angles], hidden, positions)
    layers, count = decoder.layers, decoder.config.num_hidden_layers
    whole = len(layers) == count and all(isinstance(one, RotaryTables) for one in tables)
    calls = known_layers(layers, one_call_forward, tables[0].context) if whole else None
    added = () if context.images is None else context.images.added(hidden.shape[-1])
    last = None if calls is None or added else all_computed(layers, calls, hidden, tables)
    if last is None:
        last = _one_by_one(islice(layers, count), calls, hidden, tables, positions, added)
    return DecoderOutput(decoder._modules[decoder.samebit.names.norm](last))


def factor_of(decoder: Any) -> float | None:
    """Return what a decoder multiplies its embeddings with; None for one that does not."""
    name = decoder.samebit.embedding_factor
    return decoder.__dict__[name] if name else None


def angles_of_layers(
    decoder: Any, rotate: Callable[..., Any], hidden: torch.Tensor, positions: torch.Tensor
) -> list[Any]:
    """Return the angles of each layer, those of several as one object: all alike, or alike of layers of one type."""
    count = decoder.config.num_hidden_layers
    if not decoder.samebit.angles_by_type:
        return [rotate(hidden, position_ids=positions)] * count
    kinds = decoder.config.layer_types[:count]
    tables = {kind: rotate(hidden, positions, kind) for kind in dict.fromkeys(kinds)}
    return [tables[kind] for kind in kinds]


def _one_by_one(
    layers: Iterable[Any], calls: Sequence[Found] | None, hidden: torch.Tensor, tables: Sequence[Any],
    positions: torch.Tensor, added: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Return what the layers make of hidden states, one after the other: as one call where that is known and fits.

    ``added``: what rows of images get behind each of the first layers.
    """
    chosen: torch.Tensor | None = None  # the tokens that a layer has read, of a family whose layers hand them on
    for place, layer in enumerate(layers):
        angles = tables[place]
        out = None if calls is None else computed(layer, layer.samebit, hidden, calls[place], angles, chosen)
        if out is None:
            out = _called(layer, hidden, angles, positions, chosen)
        hidden, chosen = out if isinstance(out, tuple) else (out, chosen)
        images = tables[place].context.images
        if place < len(added) and images is not None:
            sums = hidden.flatten(0, 1)[images.rows] + added[place].to(hidden.dtype)
            hidden = _put(hidden, images.rows, sums)
    return hidden


def _called(layer: Any, hidden: torch.Tensor, tables: Any, positions: torch.Tensor, chosen: torch.Tensor | None) -> Any:
    """Call a layer as the decoder's own forward does."""
    handed_on = {} if chosen is None else {"prev_topk_indices": chosen}
    return layer(hidden, attention_mask=None, position_embeddings=tables, position_ids=positions, **handed_on)
