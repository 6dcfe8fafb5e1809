"""Multiply matrices on the CPU, with equal bits for any number of rows; `*_vectors` and `amx_tiles` are
micro-kernels."""
