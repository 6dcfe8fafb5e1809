"""Say what a whole layer that is one call is given: `weights` for all of them, `attention`, `latent` for latent
attention, `delta` for Gated DeltaNet, `experts` for the experts behind any of them, `ends` for what stands around all
of them; `call` is what a device makes of any of them.

Imports, of `layout`, `options` and `lora`.
"""
