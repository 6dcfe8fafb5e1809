"""The forwards that `bind` gives to the modules of a Hugging Face model.

Each is a plain function of the module, attached to the instance together with the facts it needs
(`attach`), so that ``copy.deepcopy`` of a bound model gives a bound model.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .activation import gated
from .attention import AttentionOptions, attention
from .context import installed_context, training_context, use_context
from .linear import linear
from .norm import layer_norm, rms_norm
from .rope import RotaryTables, rotary_tables, rotate


@dataclass(frozen=True)
class NormFacts:
    """eps of a norm, and the offset of its weight."""

    eps: float
    offset: float


@dataclass(frozen=True)
class AttentionFacts:
    """Shapes and options of an attention module; `fused` and `qk_norm` as in `families.Family`."""

    kv_heads: int
    head_dim: int
    fused: bool
    qk_norm: str
    options: AttentionOptions


@dataclass(frozen=True, eq=False)
class RotaryFacts:
    """Inverse frequencies ``[R]`` float32 and scaling of each layer type ('' where there is only one)."""

    frequencies: dict[str, torch.Tensor]
    scaling: dict[str, float]


@dataclass(frozen=True)
class MLPFacts:
    """Activation of a gated MLP and whether its two projections are one."""

    activation: str
    fused: bool


@dataclass(frozen=True)
class EmbeddingFacts:
    """Factor on the embeddings."""

    scale: float


_READY_MASK = torch.empty(1, 1, 1, 1)
"""Hugging Face passes a four-dimensional mask on as it is, instead of building one that nobody reads."""


def attach(module: nn.Module, forward: Callable[..., Any], facts: Any = None) -> None:
    """Replace the forward of this instance."""
    module.__dict__["samebit"] = facts
    module.__dict__["forward"] = MethodType(forward, module)


def decoder_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The decoder's own forward, inside the layout that its arguments describe."""
    ids = args[0] if args else kwargs.get("input_ids")
    ids = kwargs["inputs_embeds"][..., 0] if ids is None else ids
    _refuse_unsupported(kwargs)
    mask, positions = kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None)
    context = installed_context() or training_context(tuple(ids.shape), mask, positions)
    if len(context.positions) != ids.numel():
        raise ValueError(f"the installed ForwardContext has {len(context.positions)} rows, input_ids {ids.numel()}")
    if torch.is_autocast_enabled("cpu"):
        warnings.warn(
            "a bound model computes in the dtype of its parameters: autocast does not change it", stacklevel=2
        )
    kwargs.update(attention_mask=_READY_MASK, position_ids=context.positions.view(ids.shape), use_cache=False)
    with use_context(context), torch.autocast("cpu", enabled=False):
        return type(self).forward(self, *args, **kwargs)


def _refuse_unsupported(kwargs: dict[str, Any]) -> None:
    if kwargs.get("past_key_values") is not None:
        raise ValueError(
            "a bound model keeps no Hugging Face cache (past_key_values): generate with samebit.rollout.RolloutWorker"
        )
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True: a bound model never forms the attention weights")


def linear_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """nn.Linear."""
    return linear(x, self.weight, self.bias)


def head_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The language-model head: float32 logits."""
    with torch.autocast("cpu", enabled=False):
        return linear(x, self.weight, self.bias).float()


def embedding_forward(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """An embedding with a factor, rounded to the embedding's dtype as the family defines it."""
    facts: EmbeddingFacts = self.samebit
    scale = torch.tensor(facts.scale, dtype=self.weight.dtype)
    return F.embedding(input_ids, self.weight, self.padding_idx) * scale


def rms_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm over the last axis."""
    facts: NormFacts = self.samebit
    return rms_norm(x, self.weight, facts.eps, facts.offset)


def layer_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """nn.LayerNorm over the last axis."""
    return layer_norm(x, self.weight, self.bias, self.eps)


def rotary_forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str = "") -> RotaryTables:
    """The angles of this call, and with them its layout on its way to the attention layers."""
    facts: RotaryFacts = self.samebit
    context = installed_context()
    if context is None:
        raise ValueError("the rotary module of a bound model runs only inside the model's forward")
    return rotary_tables(facts.frequencies[layer_type], facts.scaling[layer_type], context)


def mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A gated MLP."""
    facts: MLPFacts = self.samebit
    if facts.fused:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
    else:
        gate, up = self.gate_proj(x), self.up_proj(x)
    down: torch.Tensor = self.down_proj(gated(facts.activation, gate, up))
    return down


def attention_forward(
    self: Any, hidden_states: torch.Tensor, position_embeddings: RotaryTables, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Self-attention; what remains of the arguments are Hugging Face's mask and cache, which hold nothing here."""
    facts: AttentionFacts = self.samebit
    q, k, v = _queries_keys_values(self, facts, hidden_states)
    tables = position_embeddings
    out = attention(rotate(q, tables), rotate(k, tables), v, tables.context, facts.options)
    projected: torch.Tensor = self.o_proj(out.view(*hidden_states.shape[:-1], -1))
    return projected, None


def _queries_keys_values(
    self: Any, facts: AttentionFacts, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[T, heads, D]`` each, normalised but not rotated."""
    if facts.fused:
        qkv = self.qkv_proj(x)
        kv_width = facts.kv_heads * facts.head_dim
        q, k, v = qkv.split([qkv.shape[-1] - 2 * kv_width, kv_width, kv_width], dim=-1)
    else:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    if facts.qk_norm == "full":
        q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = (part.reshape(-1, part.shape[-1] // facts.head_dim, facts.head_dim) for part in (q, k, v))
    if facts.qk_norm == "head":
        q, k = self.q_norm(q), self.k_norm(k)
    return q, k, v
