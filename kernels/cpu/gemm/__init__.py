"""Multiply matrices on the CPU, with equal bits for any number of rows; `linear` chooses among these products.

The way through: `layers` says what a product is given; `many_rows` and `few_rows` compute it on any processor, `dots`
where instructions multiply pairs of bfloat16 (`pairs`: rows in that form), `amx` where they multiply tiles. `grouped`
is the product of experts, `heads` that of heads. The micro-kernels are in `many_rows_vectors`, `few_rows_vectors`,
`dots_vectors` and `amx_tiles`. Imports `layout` and, of `cpu`, `base`.
"""
