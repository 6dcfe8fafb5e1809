"""Compute parts of a decoder layer of attention and a gated MLP in one launch, in Triton: `gated`.

Imports `layout` and, of `triton`, `activation`, `matmul`, `numeric` and `tiles`.
"""
