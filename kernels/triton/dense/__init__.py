"""Compute parts of a decoder layer of attention and a gated MLP in one launch, in Triton."""
