"""Compute a decoder layer as one kernel on the CPU: `attention` with a gated MLP, `latent` of attention over
latents, `sparse` of that to chosen tokens; `ends` are what stands before and behind all layers.

`calls` calls such kernels, also those of other folders, one after the other. Inside of one `products` multiplies,
`terms` adds what adapters add, each with a kernel of `adapter_rows`, `mlp` is the half behind attention.
Imports `layout` and, of `cpu`, `base`, `gemm`, `attention`, `latent`, `activation`, `norm`, `rope` and `low_rank`.
"""
