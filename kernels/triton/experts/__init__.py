"""Compute routed experts in Triton: `routing` chooses, `operation` computes, by the steps in the other files.

`sorting` orders the pairs of row and expert and lists the work of a product, `grouped` multiplies each expert's rows,
`forms` is what stands between the two products, `combine` adds up a row's outputs, `sums` those over an expert's rows.
Imports `layout` and, of `triton`, `activation`, `matmul`, `numeric` and `tiles`.
"""
