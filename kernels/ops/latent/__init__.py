"""Attention over latents (MLA): the attention itself, and the products that put queries and outputs into its form."""
