"""Compute attention over latents on the CPU: latents into pages, the forward, the gradients, the choice of tokens.

The way through: `operation` gives tensors to kernels; `write_pages` writes latents; `forward` takes rows through
`chunks` of tokens, each by `softmax`, on the micro-kernels in `tiles` and `vectors`; `pairs` scores two tokens at once
for few rows, `dots` multiplies pairs of bfloat16; `backward` computes the gradients. For sparse attention, `selection`
chooses the tokens by the scores of `index`. Imports `layout` and, of `cpu`, `base`, `gemm`, `attention` and `linear`.
"""
