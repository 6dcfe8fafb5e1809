"""Layers that are one operation, their contract and what fits it: gate and up of an MLP with their activation, and a
decoder layer of attention and a gated MLP."""
