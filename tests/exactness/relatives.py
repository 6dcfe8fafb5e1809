"""Describe small models of families that compute nothing that others do not: they differ in a line or two of
`kernels/binding/families`. Gemma 4's own habits have tests of their own beside these (`test_gemma4`).
"""

from typing import Any

GROUPS = {
    "n_routed_experts": 15,
    "num_experts_per_tok": 4,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "moe_intermediate_size": 50,
}
"""Says how many experts there are in groups, and of which some are taken."""

_GRANITE_EXPERTS = {
    "intermediate_size": 100,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}

_GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "head_dim": 20,
    "global_head_dim": 28,
    "sliding_window": 20,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2Moe": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "num_experts": 15,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 50,
            "shared_expert_intermediate_size": 60,
        },
    ),
    "MiniMaxM2": (
        "MiniMaxM2",
        {
            "head_dim": 52,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "num_local_experts": 15,
            "num_experts_per_tok": 4,
            "intermediate_size": 50,
        },
    ),
    "GraniteMoe": ("GraniteMoe", {**_GRANITE_EXPERTS, "attention_bias": True}),
    "GraniteMoeShared": ("GraniteMoeShared", {**_GRANITE_EXPERTS, "shared_intermediate_size": 60}),
    "Dots1": (
        "Dots1",
        {
            **GROUPS,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "Glm4Moe, biases": ("Glm4Moe", {**GROUPS, "head_dim": 52, "attention_bias": True}),  # as inside of GLM-4.5V
    "SolarOpen": ("SolarOpen", {**GROUPS, "head_dim": 50, "attention_bias": True}),
    "HunYuanMoEV1": (
        "HunYuanMoEV1",
        {
            "head_dim": 50,
            "num_experts": 15,
            "moe_topk": [4, 4],
            "intermediate_size": 50,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
        },
    ),
    "Ernie4_5_Moe": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 3,
            "moe_layer_interval": 2,
            "moe_num_experts": 15,
            "moe_k": 4,
            "moe_intermediate_size": 50,
            "moe_num_shared_experts": 2,
            "use_bias": True,
        },
    ),
}
"""Holds those with routed experts."""

RELATIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi3, longrope": (
        "Phi3",
        {
            "max_position_embeddings": 1280,  # so angles are scaled, and a worker takes 320 of them
            "original_max_position_embeddings": 320,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.48,
                "short_factor": [1.0 + 0.3 * pair for pair in range(12)],
                "long_factor": [9.0 + pair for pair in range(12)],
            },
        },
    ),
    "Qwen2, rope dynamic": (  # as inside of InternVL 3
        "Qwen2",
        {"head_dim": 52, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "Olmo3": ("Olmo3", {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}),
    "Granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "Ministral": (
        "Ministral",
        {"head_dim": 52, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Ministral3": (
        "Ministral3",
        {
            "head_dim": 52,
            "sliding_window": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 20.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "SeedOss": (
        "SeedOss",
        {
            "head_dim": 52,
            "attention_bias": True,
            "attention_out_bias": True,
            "mlp_bias": True,
            "attention_dropout": 0.0,
            "residual_dropout": 0.0,
        },
    ),
    "SmolLM3": (
        "SmolLM3",
        {
            "num_hidden_layers": 3,
            "head_dim": 52,
            "no_rope_layers": [1, 0, 0],
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 20,
        },
    ),
    "Gemma": ("Gemma", {"head_dim": 50}),
    "Arcee": ("Arcee", {"mlp_bias": True, "attention_bias": True}),
    "Exaone4": (
        "Exaone4",
        {"head_dim": 52, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "HunYuanDenseV1": (
        "HunYuanDenseV1",
        {
            "head_dim": 50,
            "num_experts": 1,  # as published configs say, of which the class reads nothing
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
        },
    ),
    "Glm": ("Glm", {"head_dim": 52}),
    "Glm4": ("Glm4", {"head_dim": 52, "tie_word_embeddings": True}),
    "Glm4, as inside of GLM-4.1V": (
        "Glm4",
        {
            "head_dim": 50,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.48},
        },
    ),
    "Ernie4_5": ("Ernie4_5", {"head_dim": 50, "use_bias": True}),
    "Gemma4": ("Gemma4", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "Gemma4Unified": (
        "Gemma4Unified",
        {
            **_GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    "Gemma4, inputs of layers, shared keys": (
        "Gemma4",
        {
            **_GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
            "hidden_size_per_layer_input": 30,
            "vocab_size_per_layer_input": 1009,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    "Gemma4, experts": (
        "Gemma4",
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 50,
        },
    ),
    **MIXTURES,
}
"""Holds, by name, a family and what its config has beside what all have."""
