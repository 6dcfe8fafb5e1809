"""Compute attention over latents in Triton: the attention, its gradients, and the products of heads around it."""
