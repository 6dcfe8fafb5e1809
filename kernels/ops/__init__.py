"""Define the contract of each operation, with its gradient: what goes in, what comes out, what is refused.

A file holds one operation: it checks, and it is the one place where autograd meets the operation. What computes is the
table of the tensor's device (`dispatch`); nothing else here imports `samebit.kernels.cpu` or `samebit.kernels.triton`.
Below lies `samebit.kernels.layout`, above `samebit.kernels.binding`.
"""
