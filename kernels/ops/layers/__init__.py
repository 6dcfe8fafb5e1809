"""Define layers that are one operation, their contract and what fits it.

`gated` is gate and up of an MLP with their activation, `attention` a decoder layer of it, `latent` one of attention
over latents, `ends` what stands before and behind all layers; `fitting` checks what these are given; `calls` computes
several in one call.
Imports `layout` and, of `ops`, `activation`, `dispatch`, `linear` and `rope`.
"""
