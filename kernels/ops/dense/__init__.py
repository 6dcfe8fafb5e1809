"""Define layers that are one operation, their contract and what fits it.

`gated` is gate and up of an MLP with their activation, `layer` a decoder layer of attention and a gated MLP, `latent`
one of attention over latents; `fitting` checks what those two are given; `calls` computes several in one call.
Imports `layout` and, of `ops`, `activation`, `dispatch`, `linear` and `rope`.
"""
