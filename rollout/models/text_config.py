"""Read the config of a folder as that of its text model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from samebit.kernels.binding.families.inexact import DROPOUTS
from samebit.rollout.errors import ModelLoadError

_READ_HERE = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "glm4v": ("glm4v_text",),
    "glm4v_moe": ("glm4v_moe_text",),
    "internvl": ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss"),
    "lfm2_vl": ("lfm2",),
    "llava": ("llama", "mistral", "qwen2"),
    "llava_next": ("llama", "mistral", "qwen2"),
    "llava_onevision": ("qwen2",),
    "mistral3": ("mistral", "ministral3"),
    "qwen2_vl": ("qwen2_vl_text",),
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
}
"""Lists, by type, models with vision that transformers reads as a whole alone, and the text models that these may
have."""

_PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4v_text": ("glm4", {"attention_bias": True}),
    "glm4v_moe_text": ("glm4_moe", {}),
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
}
"""Lists, by type, text models that transformers has inside of one with vision alone, and the model that computes the
same for text, with what its config says and theirs does not."""

_CAPPED = ("gemma4", "gemma4_unified")
"""Lists those of them that cap their logits as the text model alone does."""

_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Names rotary parameters that say which frequencies turn by an image's rows and columns, which text has not."""

_OF_ANY = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "is_causal", "tie_word_embeddings", "head_dim")
"""Names keys that transformers reads of every config, whether its class declares them or not."""

_OF_A_LOSS = ("router_aux_loss_coef",)
"""Names keys that a trainer's own loss alone reads, which a rollout has not."""

_OF_THE_FILE = ("model_type", "architectures", "transformers_version", "_name_or_path")


def read_text_config(folder: Path) -> Any:
    """Return a folder's config; of a model that is wrapped with vision, that of the text model in it. It asks for no
    dropout, as what is made of it is not trained.

    The whole says whether the head is tied, and may say which tokens end a text: the text part of a published config
    leaves that out, and has no head.

    Raises:
        ModelLoadError: a key that the text model alone reads, and the whole does not, by name.
    """
    config = _read(folder)
    for name in DROPOUTS:
        if vars(config).get(name):
            setattr(config, name, 0.0)
    return config


def _read(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)  # None would ask
    text = config.get_text_config()
    if text is config or not _is_text_alone(config, text):
        return config
    _check_is_read(config, text)
    says_alone = config.model_type in _READ_HERE  # of others the text model's own config may say it too
    text = _as_plain(text) if text.model_type in _PLAIN else text
    text.tie_word_embeddings = config.tie_word_embeddings or (text.tie_word_embeddings and not says_alone)
    text.dtype = text.dtype or config.dtype
    text.eos_token_id = vars(config).get("eos_token_id") or text.eos_token_id
    if vars(config).get("is_causal") is False:
        text.is_causal = False  # the whole hands it on, and `bind` refuses it
    return text


def _is_text_alone(config: Any, text: Any) -> bool:
    """Return whether the text model of a whole can be read from its folder."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    by_transformers = model_class is not None and model_class.config_class is type(text)
    return by_transformers or text.model_type in _READ_HERE.get(config.model_type, ())


def _as_plain(text: Any) -> Any:
    """Return the config of the text model alone that computes what one inside of a model with vision does for text.
    What the class of the latter does not declare, it does not read, and is left out."""
    name, fixed = _PLAIN[text.model_type]
    kind: Any = CONFIG_MAPPING[name]
    given, declared = text.to_dict(), type(text)().to_dict().keys() - {*_OF_THE_FILE, *_OF_A_LOSS}
    usual = kind().to_dict()
    strange = sorted(declared - usual.keys() - {*_OF_ANY})
    if strange:
        raise ModelLoadError(
            f"the text_config of a {text.model_type} has {', '.join(strange)}, which is not known to be computed as in "
            f"a {kind.model_type}: give the bound module of the whole, or another version of transformers"
        )
    values = {key: given[key] for key in sorted({*declared, *_OF_ANY} & given.keys())}
    rope = {key: value for key, value in (values.pop("rope_parameters") or {}).items() if key not in _OF_IMAGES}
    # The plain model's class has numbers of its own for these, and the other's what follows.
    if usual.get("head_dim") is not None and values.get("head_dim") is None:
        values["head_dim"] = text.hidden_size // text.num_attention_heads
    if "partial_rotary_factor" in (usual["rope_parameters"] or {}):
        values["partial_rotary_factor"] = given.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    plain = kind(**values, **fixed, rope_parameters=rope)
    plain.eos_token_id = given.get("eos_token_id")
    return plain


def _check_is_read(config: Any, text: Any) -> None:
    """Check that text model and whole compute the same."""
    cap = vars(text).get("final_logit_softcapping")
    if cap is not None and config.model_type not in _CAPPED:
        raise ModelLoadError(
            f"final_logit_softcapping={cap} in the text_config of a {config.model_type}, whose forward does not read "
            "it and that of its text model alone does (exact: None)"
        )
