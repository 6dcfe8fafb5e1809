"""Compute the gradients of attention, convolution and scan in Triton."""
