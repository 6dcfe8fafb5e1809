"""Compute what a Gated DeltaNet layer has beside its convolution: `rule` and the `gates` that it takes.

`gradients` is the way back where a decay is a channel's; `layer` is a whole decoder layer in one call. Imports
`layout` and, of `ops`, `layers`, `dispatch` and `errors`.
"""
