"""Compute paged causal attention on the CPU: keys and values into pages, the forward, the gradients.

The way through: `step_rows` lays out the rows of a rollout's step for all layers; `operation` gives tensors to kernels;
`write_pages` writes keys and values; `forward` takes rows through their chunks of tokens, each by `softmax`, whose
products are in `vectors` and whose weights in `softmax_vectors`; `backward` computes the gradients, by
`gradient_vectors`; `groups` are the arguments they share. Imports `layout` and, of `cpu`, `base`, `gemm`, `norm` and
`rope`.
"""
