"""Compute a rollout's step in one call, from token ids to the head's logits, where its layers are one call and no hook
could tell: Python around embedding, last norm and head took a tenth of a small model's step.

Invariants:

* The modules decide, as in `one_call`: a hook on one of them, a forward that was replaced, an embedding that does more
  than look up and scale, autocast, and notes of what routers choose bring their calls back.
* What is kept of them is compared at each call, at once with what is kept of the layers (`known`).
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from samebit.kernels.binding.experts.routes import installed_notes
from samebit.kernels.binding.layers.decoder import angles_of_layers, factor_of, runs_plainly
from samebit.kernels.binding.layers.known import Found, KnownCall, kept_calls, known_layers
from samebit.kernels.binding.layers.norms import bias_of, computes_norm
from samebit.kernels.binding.layers.one_call import all_in_one, one_call_forward
from samebit.kernels.binding.layers.untouched import runs
from samebit.kernels.binding.modules import (
    DecoderFacts,
    decoder_forward,
    embedding_forward,
    rotary_forward,
    scale_of_embedding,
)
from samebit.kernels.layout.forward_context import ForwardContext, installed_context
from samebit.kernels.layout.layers.ends import EndNumbers, EndWeights
from samebit.kernels.ops.layers.calls import run_layers
from samebit.kernels.ops.layers.ends import end_calls
from samebit.kernels.ops.linear import is_hooked, is_plain, weight_and_bias


class _Step(NamedTuple):
    """Holds what a step of a model reads: its decoder, what its layers read, and what stands around them; and whether a
    child of a layer is called by itself."""

    decoder: Any
    layers: list[Found]
    ends: EndWeights
    numbers: EndNumbers
    calls_child: bool


def logits_in_one_call(model: Any, ids: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor | None:
    """Return the head's logits ``[K, N]`` float32, before the model's epilogue; None where the modules are to be
    called.

    Args:
        model: a bound causal language model in a rollout's step, whose head has the forward that `bind` gave it.
        ids: ``[1, T]``.
        kept: ``[K]``, the rows that reach the head; None for all.
    """
    context = installed_context()
    if context is None or installed_notes() is not None or not ids.is_cpu or torch.is_autocast_enabled("cpu"):
        return None
    if context.images is not None and context.images.features is not None:
        return None
    step = _known_step(model, context)
    if step is None:
        return None
    decoder, layers, weights, numbers, _ = step
    ends = end_calls(ids, kept, weights, numbers, context)
    if ends is None:
        return None
    tables = angles_of_layers(
        decoder, partial(rotary_forward, decoder._modules[decoder.samebit.names.angles]), ends.x, ids
    )
    found = all_in_one(decoder.layers, layers, ends.x, tables)
    if found is None:
        return None
    calls, angles = zip((ends.first, tables[0]), *found, (ends.last, tables[0]), strict=True)
    _check_unmerged(decoder)
    run_layers(ends.x, calls, angles)
    _check_unmerged(decoder)  # adapters may have been merged meanwhile
    return ends.logits


def _check_unmerged(decoder: Any) -> None:
    facts: DecoderFacts = decoder.samebit
    if facts.adapters is not None:
        facts.adapters.check_unmerged()


def _known_step(model: Any, context: ForwardContext) -> _Step | None:
    """Return what a step reads: found again where nothing has changed."""
    calls = kept_calls(context)
    known = None if calls is None else calls.get(model)
    if known is not None and known.holds():
        step: _Step = known.found
    else:
        parts = _parts(model, context)
        found = None if parts is None else known_layers(parts[0].layers, one_call_forward, context)
        if parts is None or found is None:
            return None
        step = _step_of(parts, found)
        if calls is not None:
            calls[model] = _noted(model, parts, step, calls[step.decoder.layers])
    decoder = step.decoder
    whole = len(step.layers) == decoder.config.num_hidden_layers and not step.calls_child
    return step if whole and decoder.embed_tokens.max_norm is None and runs_plainly(decoder, context, {}) else None


def _parts(model: Any, context: ForwardContext) -> list[Any] | None:
    """Return decoder, embedding, angles, last norm and head; None where a call of one does more than is known."""
    decoder, head = model.base_model, model.lm_head
    if not runs(decoder, decoder_forward) or not is_plain(head):
        return None
    facts: DecoderFacts = decoder.samebit
    if not facts.plain or not facts.chosen_in(context):
        return None
    embedding, names = decoder.embed_tokens, facts.names
    angles, norm = decoder._modules[names.angles], decoder._modules[names.norm]
    known = _only_looks_up(embedding) or (runs(embedding, embedding_forward) and factor_of(decoder) is None)
    plain = known and runs(angles, rotary_forward) and computes_norm(norm)
    return [decoder, embedding, angles, norm, head] if plain else None


def _only_looks_up(embedding: Any) -> bool:
    """Return whether a call of the embedding gives rows of its weight, as long as it has no ``max_norm``."""
    return type(embedding) is nn.Embedding and "forward" not in embedding.__dict__ and not is_hooked(embedding)


def _step_of(parts: list[Any], layers: list[Found]) -> _Step:
    """Return what a step reads of the modules around the layers, and of these."""
    decoder, embedding, _, norm, head = parts
    weights = EndWeights(
        embedding._parameters["weight"], norm._parameters["weight"], bias_of(norm), weight_and_bias(head)
    )
    calls_child = any(
        layer.samebit.apart and found.block is None for layer, found in zip(decoder.layers, layers, strict=True)
    )
    eps, offset = (norm.eps, 0.0) if type(norm) is nn.LayerNorm else (norm.samebit.eps, norm.samebit.offset)
    numbers = EndNumbers(_factor(decoder, embedding), eps, offset)
    return _Step(decoder, layers, weights, numbers, calls_child)


def _noted(model: Any, parts: list[Any], step: _Step, layers: KnownCall) -> KnownCall:
    """Note what the modules around the layers are now, and what these are."""
    name = step.decoder.samebit.embedding_factor
    read = [(step.decoder, name)] if name else []
    around = KnownCall.of_modules((model, step.decoder), parts, None, step.ends.present, read)
    return KnownCall.joined(step, [layers, around])


def _factor(decoder: Any, embedding: Any) -> float:
    """Return what embeddings are multiplied with: by their module, which rounds the factor, or by the decoder."""
    factor = factor_of(decoder)
    if factor is not None:
        return factor
    return 1.0 if _only_looks_up(embedding) else scale_of_embedding(embedding).item()
