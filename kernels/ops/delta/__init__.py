"""Compute what a Gated DeltaNet layer has beside its convolution: `rule` and the `gates` that it takes."""
