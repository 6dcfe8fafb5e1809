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

from samebit.kernels.binding.dense.known import Found, LayerFacts, PreparedFacts, ReadyFacts, known_weights
from samebit.kernels.binding.lora.forwards import layer_forward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.ready import ReadyLayer
from samebit.kernels.ops.dense.calls import run_layers
from samebit.kernels.ops.rope import RotaryTables

_FEW_ROWS = 256
"""What calls that are ready hold until the last is made grows with the rows: which tokens are chosen."""


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
    layer: Any, facts: LayerFacts | ReadyFacts, x: torch.Tensor, found: Found, tables: RotaryTables,
    earlier: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Return what the class's own forward would, of what was found; None where that does not fit one call. ``earlier``:
    what an earlier layer has chosen, if layers choose tokens."""
    if not isinstance(facts, ReadyFacts):
        out = facts.compute(x, found, tables)
        return None if out is None else _with_child_apart(layer, facts, *out)
    call = facts.ready(x, found, tables, earlier)
    if call is None:
        return None
    hidden = _with_child_apart(layer, facts, *call(x))
    return (hidden, call.chosen) if facts.returns_choice else hidden


def computed_in_turn(
    layers: Iterable[Any], found: Iterable[Found], x: torch.Tensor, tables: RotaryTables
) -> torch.Tensor | None:
    """Compute all layers of what was found, one after the other, after all calls were made ready; None where one can
    not be, and for many rows, whose layers take so long that what is between them does not count."""
    if tables.context.num_rows > _FEW_ROWS:
        return None
    calls: list[tuple[Any, ReadyFacts, ReadyLayer]] = []
    chosen = None
    for layer, of_layer in zip(layers, found, strict=True):
        facts = layer.__dict__["samebit"]
        call = facts.ready(x, of_layer, tables, chosen) if isinstance(facts, ReadyFacts) else None
        if call is None:
            return None
        chosen = call.chosen
        calls.append((layer, facts, call))
    for layer, facts, call in calls:
        x = _with_child_apart(layer, facts, *call(x))
    return x


def _with_child_apart(
    layer: Any, facts: LayerFacts | ReadyFacts, inside: torch.Tensor, behind: torch.Tensor | None
) -> torch.Tensor:
    return inside if behind is None else inside + layer.get_submodule(facts.apart)(behind)


def computed_together(
    layers: Iterable[Any], found: Iterable[Found], x: torch.Tensor, tables: RotaryTables
) -> torch.Tensor | None:
    """Compute all layers of what was found in one call; None where one does not fit, or has a call behind its own."""
    calls: list[LayerCall] = []
    for layer, of_layer in zip(layers, found, strict=True):
        facts = layer.__dict__["samebit"]
        call = facts.prepared(x, of_layer, tables) if isinstance(facts, PreparedFacts) else None
        if call is None or call.apart:
            return None
        calls.append(call)
    return run_layers(x, calls, tables)[0]
