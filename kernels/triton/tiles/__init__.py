"""Configure tiles by GPU family: the `table`, its `file`, and what was seen to have equal bits (`proved_equal`).

The kernels ask `table`, linear layers `proved_equal`. Imports `layout` and, of `triton`, what proves them: `matmul`,
`activation`, `numeric` and `layers`.
"""
