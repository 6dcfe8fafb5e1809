"""Compute the gated delta rule on the CPU, forward and backward."""
