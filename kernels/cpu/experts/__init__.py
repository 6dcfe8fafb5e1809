"""Compute routed experts on the CPU: `routing` chooses, `operation` computes, by the steps in the other files.

`sorting` orders the pairs of row and expert, `grouped` multiplies each expert's rows, `forms` is what stands between
the two products, `combine` adds up a row's outputs; each has its gradients beside it. `one_call` is all of them in one,
where nothing is kept for gradients, and `block` that with the router and the experts of every row, behind a decoder
layer's call. Imports `layout` and, of `cpu`, `base`, `gemm`, `activation`, `linear` and `layers`.
"""
