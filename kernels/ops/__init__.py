"""Define the contract of each operation, with its gradient: what goes in, what comes out, what is refused.

A file holds one operation: it checks, and it is the one place where autograd meets the operation. What computes is the
table of the tensor's device (`dispatch`); nothing else here imports `samebit.kernels.cpu` or `samebit.kernels.triton`.
All import `samebit.kernels.layout`. Above lies `samebit.kernels.binding`.

The way through: `linear`, then `attention`, which takes `norm` and `rope` in, then `logprobs` and `sampling`;
`activation`; `conv` of recurrent layers, `ssd` of Mamba layers. `score_arguments` checks what a caller says of a score,
`errors` raises what several operations refuse. Folders: `delta`, `latent` and `experts` are operations of those layers,
`segment_attention` that of vision towers, `lora` what adapters add, `layers` a whole layer.
"""
