"""Compute a decoder layer of attention and a gated MLP as one kernel on the CPU: `layer`.

`products` multiplies inside of such a kernel. Imports `layout` and, of `cpu`, `base`, `gemm`, `attention`,
`activation`, `norm` and `low_rank`.
"""
