"""Small peft models whose adapters change what is sampled."""

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from .families import make_model

LAYERS = ["q_proj", "k_proj", "v_proj", "in_proj", "gate_proj", "up_proj", "down_proj"]
"""Layers that some family has: the mixer's, the attention's, those of MLPs and of shared experts."""


def lora_config(rank: int = 5, **changes: Any) -> LoraConfig:
    """A config for adapters on `LAYERS`."""
    return LoraConfig(**{"r": rank, "lora_alpha": 2 * rank, "target_modules": LAYERS, **changes})


def make_peft(
    family: str, dtype: torch.dtype = torch.float32, config: LoraConfig | None = None, **options: Any
) -> PeftModel:
    """A new, unbound peft model; always the same weights."""
    own = {"num_hidden_layers": 2} if family == "Qwen3" else {}
    model = get_peft_model(make_model(family, dtype, **own), config or lora_config(), **options)
    wake(model)
    return model


def add(model: PeftModel, name: str, config: LoraConfig) -> None:
    """One more adapter, which computes something."""
    model.add_adapter(name, config)
    wake(model, name, seed=1)


@torch.no_grad()
def wake(model: nn.Module, name: str = "default", seed: int = 0) -> None:
    """Give an adapter weights as after some training: peft begins with zeros."""
    generator = torch.Generator().manual_seed(seed)
    for key, weight in model.named_parameters():
        if f".lora_B.{name}." in key:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
