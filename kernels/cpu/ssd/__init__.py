"""Compute the Mamba2 chunked scan on the CPU, forward and backward."""
