"""Hold what the kernels on the CPU are made of: compilation, arrays over memory, scalars, vectors, small tiles."""
