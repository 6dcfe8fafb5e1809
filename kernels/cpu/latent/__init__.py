"""Compute attention over latents on the CPU: latents into pages, the forward, the gradients, the products of heads."""
