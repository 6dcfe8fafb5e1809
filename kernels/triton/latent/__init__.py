"""Compute attention over latents in Triton: the attention, its gradients, and the products of heads around it.

The way through: `rows` says how rows lie, `attention` is the forward, `gradients` its way back, `heads` the products;
for sparse attention `selection` chooses tokens, and `sparse` reads them. Imports `layout` and, of `triton`, `matmul`,
`numeric`, `splits` and `tiles`.
"""
