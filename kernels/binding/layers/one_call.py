"""Run a decoder layer as one call in a rollout, its experts in another behind it, where no hook could tell.

What a kind of layer computes is in its facts (`known.LayerFacts`): `attention`, `latent`, and `delta.layer`.

Invariants:

* The modules decide: a hook on one of them, a forward that was replaced, an adapter in its first step, and gradients
  bring back the class's own forward, which calls them one by one. Hooks of the layer itself are torch's.
* What is kept of a module is compared with it at each call (`known`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from samebit.kernels.binding.experts.routes import installed_notes
from samebit.kernels.binding.layers.known import Found, LayerFacts, known_weights
from samebit.kernels.binding.lora.forwards import layer_forward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.ops.experts.block import block_call
from samebit.kernels.ops.layers.calls import run_layers
from samebit.kernels.ops.rope import RotaryTables

_FEW_ROWS = 256
"""What prepared calls hold until the last is computed grows with the rows: which tokens are chosen."""


class _Prepared(NamedTuple):
    """Holds a layer, its facts, its angles, its call, and the call of the experts behind it or None."""

    layer: Any
    facts: LayerFacts
    tables: RotaryTables
    call: LayerCall
    block: LayerCall | None


def one_call_forward(
    self: Any, hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
) -> Any:
    """Run the layer as one call, or its class's own forward."""
    facts: LayerFacts = self.samebit
    if isinstance(position_embeddings, RotaryTables) and _in_rollout(position_embeddings.context):
        found = known_weights(self, facts, position_embeddings.context)
        earlier = kwargs.get("prev_topk_indices")
        out = None if found is None else computed(self, facts, hidden_states, found, position_embeddings, earlier)
        if out is not None:
            return out
    own = layer_forward if facts.adapters else type(self).forward
    return own(self, hidden_states, *args, position_embeddings=position_embeddings, **kwargs)


def _in_rollout(context: ForwardContext) -> bool:
    """Return whether a call is one of a rollout, without gradients."""
    return context.pages is not None and not torch.is_grad_enabled()


def computed(
    layer: Any, facts: LayerFacts, x: torch.Tensor, found: Found, tables: RotaryTables,
    earlier: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Return what the class's own forward would, of what was found; None where that does not fit one call. ``earlier``:
    what an earlier layer has chosen, if layers choose tokens."""
    call = facts.prepared(x, found, tables, earlier)
    if call is None:
        return None
    hidden = _computed([_Prepared(layer, facts, tables, call, _behind(x, found))], x)
    return (hidden, call.chosen) if facts.returns_choice else hidden


def all_computed(
    layers: Iterable[Any], found: Iterable[Found], x: torch.Tensor, tables: Sequence[RotaryTables]
) -> torch.Tensor | None:
    """Compute all layers of what was found, each with its angles, with as few calls as there are children to call: each
    is prepared before the first is computed, as between two layers the caches are full of weights, and what Python does
    there takes twice to five times as long. None where one does not fit, and where what many rows choose would be held
    for all layers."""
    calls = _all_prepared(layers, found, x, tables)
    return None if calls is None else _computed(calls, x)


def all_in_one(
    layers: Iterable[Any], found: Iterable[Found], x: torch.Tensor, tables: Sequence[RotaryTables]
) -> list[tuple[LayerCall, RotaryTables]] | None:
    """Return what computes all layers of what is like ``x`` in one call, with their angles; None where `all_computed`
    makes several."""
    calls = _all_prepared(layers, found, x, tables)
    if calls is None or any(one.call.apart and one.block is None for one in calls):
        return None
    return [(call, one.tables) for one in calls for call in (one.call, one.block) if call is not None]


def _all_prepared(
    layers: Iterable[Any], found: Iterable[Found], x: torch.Tensor, tables: Sequence[RotaryTables]
) -> list[_Prepared] | None:
    """Return the calls of all layers."""
    calls: list[_Prepared] = []
    chosen = None
    for layer, of_layer, angles in zip(layers, found, tables, strict=True):
        facts: LayerFacts = layer.__dict__["samebit"]
        call = facts.prepared(x, of_layer, angles, chosen)
        if call is None or (call.chosen is not None and angles.context.num_rows > _FEW_ROWS):
            return None
        chosen = call.chosen
        calls.append(_Prepared(layer, facts, angles, call, _behind(x, of_layer)))
    return calls


def _behind(x: torch.Tensor, found: Found) -> LayerCall | None:
    """Return the call of the experts behind a layer; None without any, and where they, or who wants to know which are
    chosen, have to be called."""
    block = found.block
    return None if block is None or installed_notes() is not None else block_call(x, block.weights, block.options)


def _computed(calls: list[_Prepared], x: torch.Tensor) -> torch.Tensor:
    """Compute layers one after the other, those behind each other in one call up to one with a child that is called."""
    together: list[LayerCall] = []
    angles: list[RotaryTables] = []
    for layer, facts, tables, call, block in calls:
        together += [call] if block is None else [call, block]
        angles += [tables] * (len(together) - len(angles))
        if together[-1].apart:
            inside, behind = run_layers(x, together, angles)
            x, together, angles = inside + facts.added_behind(layer, behind), [], []
    return run_layers(x, together, angles)[0] if together else x
