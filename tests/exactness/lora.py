"""Make small peft models whose adapters change what is sampled."""

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from ..campaign import CAMPAIGN
from .families import make_model
from .relatives import MIXTURES

LAYERS = ["q_proj", "k_proj", "v_proj", "in_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"]
"""Names layers that some family has: the mixer's, the attention's, those of MLPs and of shared experts."""

AROUND_EXPERTS = (
    *("Qwen3Moe", "GptOss", "Qwen3Next", "DeepseekV3", "Glm4MoeLite"),
    *(MIXTURES if CAMPAIGN else ()),
)
"""Lists families whose MLPs' names are also those of their experts, which peft takes as parameters."""

FAMILIES = (
    *("Qwen3", "Gemma3", "Phi3", "NemotronH, experts", "GraniteMoeHybrid", "Zamba2", "OlmoHybrid", "Qwen3_5", "Lfm2"),
    *AROUND_EXPERTS,
)
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
    *("qkv_proj", "gate_up_proj"),  # of Phi-3
)
MIXERS = (
    *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("g_proj", "b_proj", "a_proj", "g_a_proj", "g_b_proj", "f_a_proj", "f_b_proj"),
)
"""Names linear layers within mixers of Gated DeltaNet and Kimi Delta Attention."""

SMALLER = {"Qwen3": {"num_hidden_layers": 2}}
"""Changes the models of `families`."""


def lora_config(rank: int = 5, **changes: Any) -> LoraConfig:
    """Return a config for adapters on `LAYERS`."""
    return LoraConfig(**{"r": rank, "lora_alpha": 2 * rank, "target_modules": LAYERS, **changes})


def config_for(family: str, rank: int, *, whole: bool = True) -> LoraConfig:
    """Return a config for all layers that may have one, but MLPs around experts, and what peft refuses of Mamba."""
    names = [*LAYERS, *PROJECTIONS, *MIXERS] if whole else LAYERS
    if family in AROUND_EXPERTS:
        names = [*PROJECTIONS, *MIXERS]
    refused = ("out_proj",) if family.startswith("NemotronH") else ()
    return lora_config(rank, target_modules=[name for name in names if name not in refused])


def make_peft(
    family: str, dtype: torch.dtype = torch.float32, config: LoraConfig | None = None, **options: Any
) -> PeftModel:
    """Return a new, unbound peft model; always the same weights."""
    model = get_peft_model(make_model(family, dtype, **SMALLER.get(family, {})), config or lora_config(), **options)
    wake(model)
    return model


def add(model: PeftModel, name: str, config: LoraConfig) -> None:
    """Add one more adapter, which computes something."""
    model.add_adapter(name, config)
    wake(model, name, seed=1)


@torch.no_grad()
def wake(model: nn.Module, name: str = "default", seed: int = 0) -> None:
    """Give an adapter weights as after some training: peft begins with zeros."""
    generator = torch.Generator().manual_seed(seed)
    for key, weight in model.named_parameters():
        if f".lora_B.{name}." in key:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
