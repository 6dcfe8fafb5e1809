"""Compute on a GPU, with kernels in Triton; `operations` is the table of what is implemented.

It imports `samebit.kernels.layout` and nothing else of the package. A file or folder has the name of its operation:
`activation`, `attention` (with `splits`), `conv`, `heads`, `linear` (with `matmul`), `norm`, `rope`, `ssd`; `delta`,
`layers`, `experts`, `latent` and `vocabulary` are folders. Gradients that have kernels of their own are in `gradients`,
the sizes of tiles in `tiles`, what all are made of in `numeric`. The way through: `numeric`, `norm`, then `matmul` and
the tiles it takes, then `attention`.

Rules, beside those of the kernels on the CPU:

* One compiled kernel a shape and dtype. What belongs to a layer is a compile-time constant, numbers that change from
  call to call are not specialised on, addresses are multiples of sixteen bytes. Another variant of a kernel may add
  in another order.
* Tiles (`tiles`) do not depend on the number of rows: only the grid does; or, where two kernels of a layer were seen to
  have equal bits, which of them runs (`proved_equal`). A row of a tile product does not depend on its place in the tile
  nor on the rows beside it.
* No atomics: what several programs add to is written in parts, and the parts are added in order.
"""
