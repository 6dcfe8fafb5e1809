"""Backward kernels of attention, convolution and scan in Triton."""
