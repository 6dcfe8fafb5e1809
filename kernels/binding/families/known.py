"""Find a family by the name of a model's class."""

from samebit.kernels.binding.families.deltas import DELTAS
from samebit.kernels.binding.families.dense import DENSE
from samebit.kernels.binding.families.latents import LATENTS
from samebit.kernels.binding.families.mambas import MAMBAS
from samebit.kernels.binding.families.mixtures import MIXTURES

FAMILIES = {name: family for family in (*DENSE, *MIXTURES, *LATENTS, *MAMBAS, *DELTAS) for name in family.model_classes}
"""Finds a family by the class name of one of its causal language models."""
