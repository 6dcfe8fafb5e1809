"""Say how the rows of a vision tower belong together: `segments`.

Imports, of `layout`, `attention_work`, `call_rows`, `forward_context`, `grids` and `transfer`.
"""
