"""Define the forwards that `bind` gives to the modules of a Hugging Face model.

Each is a plain function of the module, attached to the instance together with the facts it needs
(`attached`), so that ``copy.deepcopy`` of a bound model gives a bound model.
"""

import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from samebit.kernels.binding.bound_record import check_residual_is_not_cast
from samebit.kernels.binding.families.family import PROJECTIONS, DecoderNames
from samebit.kernels.binding.families.inexact import ExactPositions
from samebit.kernels.binding.layers.decoder import embedded, plain_decoder, runs_plainly
from samebit.kernels.binding.lora.forwards import LayoutPositions, gated_projections, projection, projections
from samebit.kernels.binding.lora.plan import PeftAdapters
from samebit.kernels.binding.residual import Addend, normed_sum
from samebit.kernels.binding.wrapped import positions_of_text
from samebit.kernels.layout import device
from samebit.kernels.layout.forward_context import (
    ForwardContext,
    LayoutMask,
    installed_context,
    training_context,
    use_context,
)
from samebit.kernels.layout.images.image_rows import ImageRows
from samebit.kernels.ops.activation import activated, gated
from samebit.kernels.ops.norm import layer_norm, rms_norm
from samebit.kernels.ops.rope import QueryFactors, RotaryTables, angles_of
from samebit.kernels.ops.score_arguments import check_no_tangents, check_not_compiled

KNOWN_POSITIONS = 1 << 14
"""Angles of at most so many positions are kept for the steps of a rollout, 4 MB with 32 of them: two lookups take less
time than what computes them, 0.1 ms of a step."""

_CACHES = ("cache", "past_key_values", "cache_params", "shared_kv_states")
"""Names the argument of a Hugging Face cache: that of all families since transformers 5.24, and before it that of most
families and that of Mamba2; and that of the keys and values that Gemma 4's layers share."""
_OF_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
"""Names arguments that tell other kernels where the sequences of a packed batch begin."""
_GENERATE = "generate with samebit.rollout.RolloutWorker"
_NO_WEIGHTS = "{}: a bound model never forms the attention weights"

Angles = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""Holds cosines and sines ``[positions, R]``: NumPy looks them up in half the time that torch takes."""


@dataclass(frozen=True)
class NormFacts:
    """Holds the eps of a norm, and the offset of its weight."""

    eps: float
    offset: float


@dataclass(frozen=True)
class DecoderFacts:
    """Says what a decoder has.

    Attributes:
        attends: attention layers, or a decoder that makes their mask in any case.
        masks_by_layer: recurrent layers, and takes a mask for each kind of layer.
        wrapped: it may be wrapped with vision.
        plain: `layers.decoder` runs it.
        adapters: those that peft has put into it; None without any.
        float32_residual: what goes from layer to layer is float32, whatever the weights are.
        layer_inputs: each layer takes an embedding of its own of the tokens.
        angles_by_type: layers of each type have angles of their own.
        names: of its modules.
        embedding_factor: attribute by which embeddings are multiplied; empty for none.
        drops_rows: its class leaves rows out of layers that read the keys of others, where no logits are made of them.
    """

    attends: bool
    masks_by_layer: bool
    wrapped: bool
    plain: bool = False
    adapters: PeftAdapters | None = None
    float32_residual: bool = False
    layer_inputs: bool = False
    angles_by_type: bool = False
    names: DecoderNames = field(default_factory=DecoderNames)
    embedding_factor: str = ""
    drops_rows: bool = False

    def chosen_in(self, context: ForwardContext) -> bool:
        """Return whether the context says which adapter rows go through, where peft has put some into the decoder."""
        return self.adapters is None or context.adapters is not None


@dataclass(frozen=True, eq=False)
class RotaryFacts:
    """Holds inverse frequencies ``[R]`` float32 and the scaling of each layer type ('' where there is only one), what
    queries are multiplied by, which positions these frequencies are of, where they are not of all, and by which of the
    three positions of a call with images each turns ``[R]``; None where such calls have no others."""

    frequencies: dict[str, torch.Tensor]
    scaling: dict[str, float]
    query_factors: QueryFactors | None = None
    exact: ExactPositions | None = None
    axes: torch.Tensor | None = None
    _moved: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict)
    _known: dict[str, Angles] = field(default_factory=dict)

    def on(self, device: torch.device, layer_type: str) -> torch.Tensor:
        """Return the frequencies of a layer type on this device; moved once, because a CUDA graph can not record
        that."""
        if (layer_type, device) not in self._moved:
            self._moved[layer_type, device] = self.frequencies[layer_type].to(device)
        return self._moved[layer_type, device]

    def check_positions(self, context: ForwardContext) -> None:
        """Raise where a trainer's call has positions that these frequencies are not of; a worker knows its limit, and
        the host the lengths of sequences."""
        exact = self.exact
        if exact is not None and context.pages is None and context.longest > exact.count:
            raise ValueError(
                f"a sequence of {context.longest} tokens; of a model with {exact.scaling} rotary scaling the first "
                f"{exact.count} positions are exact ({exact.key}): behind them Hugging Face turns every token of a "
                "call by other frequencies"
            )

    def positions_of(self, context: ForwardContext) -> torch.Tensor:
        """Return what rotates the rows of a call: ``[T]``, or ``[T, R]`` where there are images."""
        if context.images is None or self.axes is None:
            return context.positions
        of_frequencies: torch.Tensor = context.images.rotary_positions[self.axes].T
        return of_frequencies.to(context.positions.device)

    def known(self, context: ForwardContext, layer_type: str) -> Angles | None:
        """Return cosines and sines of positions from 0 on, those of a rollout's call on the CPU among them; None for
        another call, and for many positions."""
        longest = context.longest
        if context.pages is None or device.on_gpu(context.positions) or longest > KNOWN_POSITIONS:
            return None
        known = self._known.get(layer_type)
        if known is None or len(known[0]) < longest:
            positions = torch.arange(1 << longest.bit_length(), device="cpu")
            cos, sin = angles_of(positions, self.frequencies[layer_type], self.scaling[layer_type])
            known = self._known[layer_type] = cos.numpy(), sin.numpy()
        return known


@dataclass(frozen=True)
class MLPFacts:
    """Holds the activation of an MLP, form and names of its projections (`families.MLPFamily`), and factors.

    Attributes:
        gate_multiplier: factor on the gate.
        down_multiplier: factor on the result.
        adapter: place in the list of adapters that a shared MLP adds to its first projection; -1 for none.
    """

    activation: str
    form: str
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0
    adapter: int = -1
    names: tuple[str, str, str] = PROJECTIONS


@dataclass(frozen=True)
class EmbeddingFacts:
    """Holds the factor on the embeddings."""

    scale: float


def decoder_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the decoder's own forward inside the layout that its arguments describe."""
    check_not_compiled("a bound model")
    ids = ids_of_call(args, kwargs)
    installed = installed_context()
    _refuse_unsupported(ids, kwargs)
    if installed is None:
        check_no_tangents("a bound model")
        refuse_unread(self.config, kwargs)
    mask, positions = kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None)
    positions = positions_of_text(positions, mask) if self.samebit.wrapped else positions
    context = installed or training_context(tuple(ids.shape), mask, positions, ids.device)
    if len(context.positions) != ids.numel():
        raise ValueError(f"the installed ForwardContext has {len(context.positions)} rows, input_ids {ids.numel()}")
    if self.samebit.layer_inputs and kwargs.get("inputs_embeds") is not None and kwargs.get("per_layer_inputs") is None:
        raise ValueError("inputs_embeds without per_layer_inputs, which are looked up by token ids: give input_ids")
    casts = torch.is_autocast_enabled(ids.device.type)
    if casts:
        warnings.warn(
            "a bound model computes in the dtype of its parameters: autocast does not change it", stacklevel=2
        )
    facts: DecoderFacts = self.samebit
    if facts.float32_residual:
        check_residual_is_not_cast([*self.layers, self.norm_f])
    positions = context.positions.view(ids.shape)
    if facts.adapters is not None:
        facts.adapters.check_unmerged()
    plain = facts.plain and facts.chosen_in(context) and not (args or casts or ids.is_cuda)
    if plain and runs_plainly(self, context, kwargs):
        hidden = plain_decoder(self, ids, positions, context)
        if facts.adapters is not None:  # they may have been merged meanwhile
            facts.adapters.check_unmerged()
        return hidden
    if facts.adapters is not None:
        context = context if context.adapters is not None else replace(context, adapters=facts.adapters.of_flags())
        positions = LayoutPositions.of(context, positions)
    if context.images is not None and context.images.features is not None:
        args, kwargs = (), {**kwargs, "input_ids": None, **_of_images(self, ids, context, context.images)}
    kwargs.update(attention_mask=_mask(facts, context), position_ids=positions, use_cache=False)
    kwargs.update({"logits_to_keep": None} if facts.drops_rows else {})  # no number: all rows are computed
    with ExitStack() as stack:
        stack.enter_context(use_context(context))
        if ids.is_cuda:
            stack.enter_context(torch.cuda.device_of(ids))
        if casts:
            stack.enter_context(torch.autocast(ids.device.type, enabled=False))
        out = type(self).forward(self, *args, **kwargs)
    if facts.adapters is not None:  # they may have been merged meanwhile
        facts.adapters.check_unmerged()
    return out


def _of_images(self: Any, ids: torch.Tensor, context: ForwardContext, images: ImageRows) -> dict[str, Any]:
    """Return what the class's own forward is given of images: embeddings, and what it adds behind its first layers."""
    hidden = embedded(self, ids, context)
    added = images.added(hidden.shape[-1])
    if not added:
        return {"inputs_embeds": hidden}
    marked = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device)
    marked[images.rows.to(ids.device)] = True
    return {"inputs_embeds": hidden, "visual_pos_masks": marked.view(ids.shape), "deepstack_visual_embeds": [*added]}


def ids_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a call's token ids; where it has embeddings instead, a tensor of the shape that ids would have."""
    ids = args[0] if args else kwargs.get("input_ids")
    return kwargs["inputs_embeds"][..., 0] if ids is None else ids


def _mask(facts: DecoderFacts, context: ForwardContext) -> LayoutMask | dict[str, LayoutMask]:
    if not facts.attends:
        return LayoutMask.of(context, dimensions=2)
    mask = LayoutMask.of(context, dimensions=4)
    return dict.fromkeys(("full_attention", "linear_attention", "conv"), mask) if facts.masks_by_layer else mask


def _refuse_unsupported(ids: torch.Tensor, kwargs: dict[str, Any]) -> None:
    for name in _CACHES:
        if kwargs.get(name) is not None:
            raise ValueError(f"a bound model keeps no Hugging Face cache ({name}): {_GENERATE}")
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == ids.dim() == 2 and mask.shape[1] > ids.shape[1]:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(mask.shape)}; the tokens "
            f"before them are in no Hugging Face cache, for a bound model keeps none: {_GENERATE}"
        )
    if kwargs.get("output_attentions"):
        raise ValueError(_NO_WEIGHTS.format("output_attentions=True"))
    if kwargs.get("return_shared_kv_states"):
        raise ValueError("return_shared_kv_states=True: a bound model hands out no keys and values")
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal=False: a bound model attends to no later token; allowed: True, or none given")


def refuse_unread(config: Any, kwargs: dict[str, Any]) -> None:
    """Raise where the config asks for attentions, or a packed batch has no positions.

    A caller that installs a layout says where sequences begin, and reads no attentions.
    """
    if kwargs.get("output_attentions") is None and config.output_attentions:
        raise ValueError(_NO_WEIGHTS.format("output_attentions=True (of the config)"))
    refuse_packed(kwargs)


def refuse_packed(kwargs: dict[str, Any]) -> None:
    """Raise where a packed batch comes without positions, from which a bound model reads where sequences begin.

    Raises:
        ValueError: the arguments that say it instead, by name.
    """
    given = [name for name in _OF_PACKED if kwargs.get(name) is not None]
    if given and kwargs.get("position_ids") is None:
        raise ValueError(
            f"{', '.join(given)} without position_ids, from which alone a bound model reads where a packed sequence "
            "begins: give position_ids, which begin at 0 at each sequence (DataCollatorWithFlattening returns them by "
            "default)"
        )


def embedding_forward(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Look embeddings up and multiply them with a factor, rounded to the embedding's dtype as the family defines it."""
    return F.embedding(input_ids, self.weight, self.padding_idx) * scale_of_embedding(self)


def scale_of_embedding(embedding: Any) -> torch.Tensor:
    """Return the factor on the embeddings of such a module, in their dtype."""
    facts: EmbeddingFacts = embedding.samebit
    return torch.tensor(facts.scale, dtype=embedding.weight.dtype, device="cpu")


def rms_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute RMSNorm over the last axis."""
    facts: NormFacts = self.samebit
    normed = normed_sum(x, self.weight, facts.eps, facts.offset)
    return rms_norm(x, self.weight, facts.eps, facts.offset) if normed is None else normed


def layer_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute LayerNorm over the last axis."""
    return layer_norm(x, self.weight, self.bias, self.eps)


def rotary_forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str = "") -> RotaryTables:
    """Return the angles of this call, and with them its layout on its way to the attention layers."""
    facts: RotaryFacts = self.samebit
    context = installed_context()
    if context is None:
        raise ValueError("the rotary module of a bound model runs only inside the model's forward")
    facts.check_positions(context)
    factors = None if facts.query_factors is None else facts.query_factors.at(context.positions)
    positions, known = facts.positions_of(context), facts.known(context, layer_type)
    if known is not None:
        cos, sin = (torch.from_numpy(_looked_up(part, positions.numpy())) for part in known)
    else:
        cos, sin = angles_of(positions, facts.on(positions.device, layer_type), facts.scaling[layer_type])
    return RotaryTables(cos, sin, context, factors)


def _looked_up(known: npt.NDArray[np.float32], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return the rows of these positions ``[T]``; or of each column the one of its own ``[T, R]``."""
    return known.take(positions, axis=0) if positions.ndim == 1 else np.take_along_axis(known, positions, axis=0)


def mlp_forward(self: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Compute an MLP; what remains of the arguments is the layer number, which `bind` knows."""
    facts: MLPFacts = self.samebit
    if facts.form == "plain":
        up, down = (self._modules[name] for name in facts.names[1:])
        return Addend.of(projection(activated(facts.activation, projection(x, up)), down))
    if facts.form == "input_linear":
        gate, up = projection(x, self.input_linear).chunk(2, dim=-1)
        out = projection(gated(facts.activation, gate, up), self.output_linear)
        return out
    out = projection(_gated(self, facts, x), self._modules[facts.names[2]])
    return Addend.of(out if facts.down_multiplier == 1.0 else out * facts.down_multiplier)


def _gated(self: Any, facts: MLPFacts, x: torch.Tensor) -> torch.Tensor:
    """Return the activated gate times the up of an MLP that has them in one layer or in two."""
    if facts.form == "fused":
        joined = projection(x, self.gate_up_proj)
        joined = joined + self.gate_up_proj_adapter_list[facts.adapter](x) if facts.adapter >= 0 else joined
        gate, up = joined.chunk(2, dim=-1)
    else:
        both = self._modules[facts.names[0]], self._modules[facts.names[1]]
        if facts.gate_multiplier == 1.0:
            return gated_projections(facts.activation, x, both)
        gate, up = projections(x, both)
    gate = gate if facts.gate_multiplier == 1.0 else gate * facts.gate_multiplier
    return gated(facts.activation, gate, up)
