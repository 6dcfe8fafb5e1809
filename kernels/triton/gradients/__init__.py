"""Compute the gradients of operations whose way back has kernels of its own, in Triton.

`attention` first, which recomputes a chunk's scores as the forward does; `conv`; then `ssd` and `delta`, the recurrent
layers, over `decays`, what is left in a chunk of either. Imports `layout` and, of `triton`, `attention`, `numeric` and
`tiles`.
"""
