"""Compute what a Gated DeltaNet layer has beside its convolution, in Triton: `rule` and the `gates` that it takes.

Imports `layout` and, of `triton`, `numeric` and `tiles`.
"""
