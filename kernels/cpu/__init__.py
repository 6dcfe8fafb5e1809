"""Compute on the CPU: the kernels are Numba loops in strict IEEE arithmetic; `operations` is the table of what is
implemented.

It imports `layout`, `openmp` and `team` of `samebit.kernels`. A file or folder has the name of its operation:
`activation`, `conv`, `rope`, `logprobs`, `sampling` (with the numbers of `philox`), `linear` (with `weight_gradient`
and `transpose`), `low_rank` (with `low_rank_vectors`); `norm`, `attention`, `latent`, `ssd`, `delta`, `experts` and
`layers` are folders; `ngrams` looks for tokens in others. `base` is what all are made of, `gemm` the matrix products. A
kernel (`base.jit`) shares out its items among threads (`base.share_out`); what an item calls are parts (`base.part`),
compiled within the kernel. A kernel that computes a whole layer calls others (`base.callee`). The way through:
`base.part`, `base.jit`, then `norm.forward`, the shortest whole operation, then `linear`.

Words, here and in the folders:

    item    a unit of a kernel's work, which one thread takes
    kind    a number that stands for the type of an array's elements (`base.memory.kind_of`)
    room    scratch memory, which the caller of a kernel allocates
    record  what the kernel of a whole layer reads: sizes and addresses, eight bytes each (`layers.calls`)
    terms   what an adapter adds to the linear layers of one input
    tile    rows of a sequence that are computed together; a bunch is tiles that read the same first blocks
    slab    rows whose scores of an indexer are in memory at once

Invariant: every Numba kernel fixes the order of its operations in the source (``fastmath`` off, fused
multiply-adds written out), so its bits do not depend on vector width, thread count or the other rows.
"""
