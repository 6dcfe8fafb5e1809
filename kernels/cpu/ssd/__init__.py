"""Compute the Mamba2 chunked scan on the CPU, forward and backward.

The way through: `operation` gives tensors to kernels; `scan` is the one kernel of the forward, `groups` are the
arguments of its functions, `backward` computes the gradients. Imports `layout` and, of `cpu`, `base`.
"""
