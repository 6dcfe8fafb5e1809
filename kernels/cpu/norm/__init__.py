"""Compute RMSNorm, gated or not, and LayerNorm on the CPU: `forward` and `backward`, which has the gradients.

Imports `layout` and, of `cpu`, `base`.
"""
