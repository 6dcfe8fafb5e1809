"""Run a decoder layer as one call in a rollout, with that of its experts behind it, where no hook could tell.

What a kind of layer computes is in its facts (`known.LayerFacts`): `layer`, `latent`, and `delta.layer`.

Invariants:

* The modules decide: a hook on one of them, a forward that was replaced, several adapters in one call, and gradients
  bring back the class's own forward, which calls them one by one. Hooks of the layer itself are torch's.
* What is kept of a module is compared with it at each call (`known`).
"""

from collections.abc import Iterable
from typing import Any

import torch

from samebit.kernels.binding.dense.known import Found, LayerFacts, known_weights
from samebit.kernels.binding.lora.forwards import layer_forward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.ops.dense.calls import run_layers
from samebit.kernels.ops.rope import RotaryTables

_FEW_ROWS = 256
"""What prepared calls hold until the last is computed grows with the rows: which tokens are chosen."""


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
    hidden = _computed([(layer, facts, call)], x, tables)
    return (hidden, call.chosen) if facts.returns_choice else hidden


def all_computed(
    layers: Iterable[Any], found: Iterable[Found], x: torch.Tensor, tables: RotaryTables
) -> torch.Tensor | None:
    """Compute all layers of what was found, with as few calls as there are children apart: each is prepared before the
    first is computed, as between two layers the caches are full of weights, and what Python does there takes twice to
    five times as long. None where one does not fit, and where what many rows choose would be held for all layers."""
    calls: list[tuple[Any, LayerFacts, LayerCall]] = []
    chosen = None
    for layer, of_layer in zip(layers, found, strict=True):
        facts: LayerFacts = layer.__dict__["samebit"]
        call = facts.prepared(x, of_layer, tables, chosen)
        if call is None or (call.chosen is not None and tables.context.num_rows > _FEW_ROWS):
            return None
        chosen = call.chosen
        calls.append((layer, facts, call))
    return _computed(calls, x, tables)


def _computed(calls: list[tuple[Any, LayerFacts, LayerCall]], x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Compute layers one after the other, those behind each other in one call up to one with a child apart."""
    together: list[LayerCall] = []
    for layer, facts, call in calls:
        together.append(call)
        if call.apart:
            inside, behind = run_layers(x, together, tables)
            x, together = inside + layer.get_submodule(facts.apart)(behind), []
    return run_layers(x, together, tables)[0] if together else x
