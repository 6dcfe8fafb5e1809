"""Compute the gated delta rule on the CPU, forward and backward.

The way through: `operation` gives tensors to kernels; `rule` takes a sequence's tokens through its state, chunk by
chunk; `tail` puts them into the chunk that is not finished; `panels` says where a state's elements lie; `groups` are
the arguments they share; `gradients` is the way back. `gates` are operations of their own, `layer` is a whole decoder
layer in one call, with the `mixer` in it and its `projections`. Imports `layout` and, of `cpu`, `base`, `conv`, `norm`,
`gemm` and `layers`.
"""
