"""Lay out what layers with a recurrent state keep of a sequence.

`memory` is of all kinds of layers, `mamba`, `delta` and `conv` of each. Imports `device`, `grids`, `memory_pool` and
`transfer` of `layout`.
"""
