"""Compute paged causal attention on the CPU: keys and values into pages, the forward, the gradients."""
