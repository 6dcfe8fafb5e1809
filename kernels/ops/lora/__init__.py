"""Compute what low-rank adapters add to linear layers."""
