"""Name what a model has that is not exact, whatever its family."""

from dataclasses import dataclass
from typing import Any, TypeGuard

from samebit.kernels.binding.families.family import Family, LayerFamily

EXACT_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "longrope", "dynamic")
"""Lists the rotary scalings whose frequencies are fixed by the config alone: of the last two, those of the positions
that `exact_positions` counts."""

_FIRST, _ALL = "original_max_position_embeddings", "max_position_embeddings"
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NONE = (None, 0, 1)
"""Holds such counts of dense models: Hunyuan's published configs say 1."""
DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("dropout", "residual_dropout", "embedding_dropout"),
)
"""Names the keys of configs for dropout, which only a model in training has."""


@dataclass(frozen=True)
class ExactPositions:
    """Says how many positions have angles that no other position of a call changes, and why.

    Attributes:
        count: how many.
        scaling: what turns all tokens of a call by other frequencies as soon as one of them is behind these positions.
        key: what the config calls the count.
    """

    count: int
    scaling: str
    key: str


def exact_positions(family: Family | None, config: dict[str, Any]) -> ExactPositions | None:
    """Return the positions that are exact under a model's rotary scaling; None where that limits nothing."""
    found = [ExactPositions(count, kind, key) for kind, key, count in _limits(family, config) if _is_length(count)]
    return min(found, key=lambda limit: limit.count, default=None)


def _limits(family: Family | None, config: dict[str, Any]) -> list[tuple[str, str, object]]:
    """Return the scalings that are exact up to a position, each with the key of that number and what is given for it:
    the positions that a model was first trained on, or all that its config counts."""
    limits: list[tuple[str, str, object]] = []
    for entry in _rope_sets(family, config):
        kind = entry.get("rope_type")
        if kind == "longrope":
            limits.append((kind, _FIRST, entry.get(_FIRST)))
        elif kind == "dynamic":
            limits.append((kind, _ALL, config.get(_ALL)))
    return limits


def _is_length(given: object) -> TypeGuard[int]:
    return type(given) is int and given > 1


def _rope_sets(family: Family | None, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters of rotary embeddings: those of each layer type, or the only ones; none where an alpha is
    all that counts."""
    parameters = config.get("rope_parameters") or {}
    if family is not None and family.attention.rotation.is_fixed_by_alpha(parameters):
        return []
    return [entry for entry in parameters.values() if isinstance(entry, dict)] or [parameters]


def inexact_features(family: Family | None, config: dict[str, Any], parameter_names: list[str]) -> list[str]:
    """Return what a model has that is not exact, each with where it was seen; empty for a plain dense decoder.

    Args:
        family: of the model, if it is known.
        config: the Hugging Face config as a dictionary.
        parameter_names: of the model's state dict.
    """
    found = [f"dropout ({name}={config[name]}; exact: 0.0)" for name in DROPOUTS if config.get(name)]
    # Gemma 4 has such counts without experts too, and experts of its own (`gemma.experts`).
    if (family is None or family.experts is None) and "enable_moe_block" not in config:
        found += [f"routed experts ({name}={config[name]})" for name in _EXPERT_COUNTS if config.get(name) not in _NONE]
    if config.get("router_jitter_noise"):
        noise = config["router_jitter_noise"]
        found.append(f"random factors on the router's input (router_jitter_noise={noise}; exact: 0.0)")
    if config.get("clip_qkv") is not None:
        found.append(f"clamped queries, keys and values (clip_qkv={config['clip_qkv']}; exact: None)")
    found += _layer_features(family, config) + _rope_features(family, config)
    sinks = [name for name in parameter_names if name.endswith("sinks")]
    if sinks and not (family is not None and family.attention.sinks):
        found.append(f"attention sinks ({sinks[0]})")
    if config.get("alibi") or config.get("position_embedding_type") == "alibi":
        found.append("ALiBi position biases")
    if config.get("kv_lora_rank") and (family is None or family.latent is None):
        found.append(f"latent attention (kv_lora_rank={config['kv_lora_rank']})")
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # "vision": of images alone
        found.append("bidirectional attention (use_bidirectional_attention)")
    if not config.get("is_causal", True):  # transformers' masks read it of every config
        found.append(f"bidirectional attention (is_causal={config['is_causal']}; exact: True)")
    if config.get("use_parallel_residual"):
        found.append("parallel residual (use_parallel_residual)")
    if config.get("qk_layernorm"):
        found.append("per-head LayerNorm of queries and keys (qk_layernorm)")
    if config.get("mamba_ssm_cache_dtype", "float32") != "float32":
        found.append(f"a state that is not float32 (mamba_ssm_cache_dtype={config['mamba_ssm_cache_dtype']})")
    found += _unread_width(family, config)
    if family is None or not family.attention.by_layer_type:
        kinds = {"num_kv_shared_layers": "keys of earlier layers", "hidden_size_per_layer_input": "inputs of layers"}
        found += [f"{kind} ({name}={config[name]}; exact: 0)" for name, kind in kinds.items() if config.get(name)]
    if config.get("quantization_config"):
        found.append("quantized weights (quantization_config)")
    return found


def _layer_features(family: Family | None, config: dict[str, Any]) -> list[str]:
    """Name the layers that Hugging Face may take for attention although the config calls them something else."""
    given = {*(config.get("layer_types") or ()), *(config.get("layers_block_type") or ())}
    layers = LayerFamily() if family is None else family.layers
    names = f"layer types given: {', '.join(sorted(given))}; allowed: {', '.join(layers.allowed)}"
    found = [f"layers of type {kind!r} ({names})" for kind in sorted(given - {*layers.allowed})]
    if layers.required and layers.required not in given:
        found.append(f"no layer of type {layers.required!r}, without which Hugging Face can not run it ({names})")
    switch = layers.window_switch
    if switch and "sliding_attention" in given and not config[switch]:
        found.append(
            f"layers of type 'sliding_attention' with {switch}={config[switch]}: of Hugging Face's ways to attend some "
            f"have a window there and some have none; exact: {switch}=True, or layers of full attention"
        )
    return found


def _rope_features(family: Family | None, config: dict[str, Any]) -> list[str]:
    parameters, sets = config.get("rope_parameters") or {}, _rope_sets(family, config)
    kinds = sorted({str(entry.get("rope_type", "default")) for entry in sets} - set(EXACT_ROPE_TYPES))
    found = [f"{kind} rotary scaling (it depends on the longest position of the whole call)" for kind in kinds]
    found += [
        f"{kind} rotary scaling with {key}={count!r}{' in rope_parameters' if key == _FIRST else ''} (exact: an "
        "integer from 2 on)"
        for kind, key, count in _limits(family, config)
        if not _is_length(count)
    ]
    if family is not None and _scales_windows(family, config):
        found.append(
            f"{parameters.get('rope_type')} rotary scaling of layers with a window too, as this transformers computes "
            "it: published models have none there (exact: transformers from 5.13 on)"
        )
    if family is not None and family.attention.scaled_queries:
        beta, every = (parameters.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
        if not isinstance(beta, int | float) or not isinstance(every, int) or every < 1:
            found.append(
                f"queries scaled by position with llama_4_scaling_beta={beta} and original_max_position_embeddings="
                f"{every} in rope_parameters (exact: a number, and an integer from 1 on)"
            )
    return found


def _scales_windows(family: Family, config: dict[str, Any]) -> bool:
    """Return whether layers with a window would be rotated by a scaling that is meant for the others."""
    meant = family.attention.rotation.unscaled_windows and not family.attention.rope_per_layer_type
    scaling = (config.get("rope_parameters") or {}).get("rope_type", "default")
    return meant and scaling != "default" and "sliding_attention" in (config.get("layer_types") or ())


def _unread_width(family: Family | None, config: dict[str, Any]) -> list[str]:
    """Name a width of rotation that this version of transformers does not read, and so computes another model."""
    key = "" if family is None else family.attention.rotation.width
    width, size = config.get(key), config.get("head_dim")
    if width is None or size is None:
        return []
    part = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    if int(size * part) == width:
        return []
    return [
        f"{key}={width}, which this transformers does not read: it rotates {int(size * part)} of {size} elements of a "
        f"head (exact: rope_parameters['partial_rotary_factor']={width / size})"
    ]
