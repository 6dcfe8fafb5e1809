"""Hold what the kernels on the CPU are made of: compilation, arrays over memory, scalars, vectors, small tiles.

From the ground up: `references` leaves out the counting of references where code only borrows memory; `part` compiles
functions that kernels call, `callee` lets them call kernels, and `jit` compiles kernels, which `kernel_cache` keeps on
disk; `share_out` divides their items among threads; `numeric` computes with scalars; `vectors` emits sixteen lanes in
LLVM; `memory` makes arrays of addresses, and copies; `rows` hands functions of vectors their rows, `small_tiles` and
`state_tiles` multiply with them. Imports `layout`, `openmp` and `team`, and nothing else of `cpu`.
"""
